"""Prefill: the layer over many tokens at once, and the chunked delta rule that it stands on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.layer.state import GDNState
from gdn_jax.report.progress import Stage
from gdn_jax.report.record import Report
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.prefill.rule import (
    adversarial,
    bfloat16,
    chunk_size,
    drift8192,
    lengths,
    packed,
)
from gdn_jax.verify.prefill.run import (
    TOKENS,
    Found,
    LayerRun,
    Pass,
    far,
    one,
    pass_row,
    row,
    same,
    verdict,
)
from gdn_jax.verify.subject import Subject

CUTS = (1, 2, 37, 63, 64, 65)
"""Places to split at, W-1 besides: around a chunk and, of SPLIT tokens, with a rest of 1 to 3."""
SPLIT = 66
DECODED = 8
"""Tokens at most that are decoded behind a prefill."""
PADDED = (0, 1, 2, 33, 64)
"""Lengths of rows that are padded to one more than the longest."""
LIVE = 5
"""Tokens in the state from which the padded rows go on."""


def run(
    subject: Subject, report: Report, *, layers: int, backend: str | None, stage: Stage
) -> None:
    """Run every check of the suite and add it, with its rows, to the report.

    One layer at a time: ``layers`` of a stack change nothing.
    """
    with stage("weights to the device"):
        this = LayerRun.of(subject.cfg, subject.weights, backend, subject.oracle)
    table = report.tables.setdefault("prefill", [])
    for name, measure in CHECKS.items():
        with stage(f"prefill.{name}"):
            rows, detail = measure(this)
        if not rows:
            continue
        value, where = verdict(rows)
        table += [{"check": f"prefill.{name}", **row} for row in rows]
        detail, limit = f"{detail}; worst: {where}", rows[0]["limit"]
        report.checks.append(check(f"prefill.{name}", value, limit, detail))


def float64(this: LayerRun) -> Found:
    """All tokens at once against the layer in float64."""
    exact = this.exact
    found = one(*this.prefill(this.xs[None]))
    rows = [pass_row(f"{TOKENS} tokens", found, (exact["OUT"], exact["S"][-1], exact["HIST"][-1]))]
    return rows, f"the layer over {TOKENS} tokens"


def transformers(this: LayerRun) -> Found:
    """What the real layer makes of its oracle's inputs, at once and token by token."""
    known = this.oracle
    if known is None:
        return [], ""
    found = one(*this.prefill(known.xs[None]))
    cached = known.trace
    rows = [
        row("the one-shot path", far(found[0], known.one_shot["OUT"])),
        pass_row("the cached path", found, (cached["OUT"], cached["S"], cached["HIST"])),
    ]
    return rows, f"{len(known.xs)} tokens"


def split(this: LayerRun) -> Found:
    """Two passes against one, and prefill with decode behind or before it against decode alone."""
    xs, rows = this.xs[None, :SPLIT], []
    whole = one(*this.prefill(xs))
    ys, end, after = this.decode(xs)
    for cut in sorted({*CUTS, this.cfg.conv_width - 1}):
        head, between = this.prefill(xs[:, :cut])
        two = _joined(head, *this.prefill(xs[:, cut:], between))
        rows.append(pass_row(f"{cut} + {SPLIT - cut}", two, whole))
        stop = min(SPLIT, cut + DECODED)
        tail, last, _ = this.decode(xs[:, cut:stop], between)
        wanted = one(ys[:, :stop], after[stop])
        rows.append(pass_row(f"{cut} + {stop - cut} decoded", _joined(head, tail, last), wanted))
        late = _joined(ys[:, :cut], *this.prefill(xs[:, cut:], after[cut]))
        rows.append(pass_row(f"{cut} decoded + {SPLIT - cut}", late, one(ys, end)))
    return rows, f"{SPLIT} tokens split in two"


def padding(this: LayerRun) -> Found:
    """Rows of other lengths from a live state, NaN behind their last token, against float64."""
    exact, longest = this.exact, max(PADDED)
    held = (exact["S"][LIVE - 1], exact["HIST"][LIVE - 1])
    start = GDNState(*(jnp.asarray(np.stack([x] * len(PADDED)), jnp.float32) for x in held))
    xs = np.full((len(PADDED), longest + 1, this.cfg.d_model), np.nan, np.float32)
    for b, n in enumerate(PADDED):
        xs[b, :n] = this.xs[LIVE : LIVE + n]
    ys, state = this.prefill(xs, start, np.array(PADDED, np.int32))
    rows = []
    for b, n in enumerate(PADDED):
        found, end = one(ys, state, b), LIVE + n
        behind = np.inf if np.any(found[0][n:]) else 0.0
        if n:
            wanted = (exact["OUT"][LIVE:end], exact["S"][end - 1], exact["HIST"][end - 1])
            pairs = zip((found[0][:n], *found[1:]), wanted, strict=True)
            out, S, history = (far(x, y) for x, y in pairs)
        else:
            kept = (np.asarray(x[b]) for x in jax.tree.leaves(start))
            out, (S, history) = 0.0, map(same, found[1:], kept)
        rows.append(row(f"{n} of {longest + 1}", max(out, behind), S, history))
    return rows, f"{len(PADDED)} rows of {longest + 1} tokens, NaN behind the last that counts"


def _joined(head: np.ndarray, tail: np.ndarray, state: GDNState) -> Pass:
    return one(np.concatenate([head, tail], axis=1), state)


CHECKS: dict[str, Callable[[LayerRun], Found]] = {
    measure.__name__: measure
    for measure in (
        float64,
        transformers,
        lengths,
        split,
        packed,
        padding,
        chunk_size,
        adversarial,
        drift8192,
        bfloat16,
    )
}
STAGES = 1 + len(CHECKS)
