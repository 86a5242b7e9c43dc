"""The chunked delta rule against float64: lengths, packed sequences, chunk sizes, hard inputs."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax.ops.chunk_xla import CHUNK_SIZES
from gdn_jax.report.record import Row
from gdn_jax.verify.draw import draw_weights, drift_config
from gdn_jax.verify.prefill import run as prefill_run
from gdn_jax.verify.prefill.run import NARROW_LIMIT, Found, LayerRun, far, one, pass_row, row, same

LENGTHS = (1, 2, 3, 63, 64, 65, 500, 1000, 4096)
PACKED = (37, 51, 40, 0, 1)
BEHIND = 3
"""Tokens behind the last packed sequence."""
MIDDLE, LONG = 150, 8192
"""Tokens: a multiple of no chunk, and enough for an error to grow."""
CHUNK = 64
HK, G, K, V = 2, 3, 64, 128
"""Key heads, value heads to each of them, and their widths."""
Drawn = dict[str, Any]
"""Operands of the rule by name."""
Result = tuple[np.ndarray, np.ndarray]
"""Outputs and final states."""


def lengths(this: LayerRun) -> Found:
    """Any number of tokens, from a live state."""
    rows = []
    for T in LENGTHS:
        drawn = draw(T)
        rows.append(row(f"T = {T}", *_far(run(this, drawn), _exact(drawn))))
    return rows, f"the operator, K {K}, V {V}, {HK} and {HK * G} heads"


def bfloat16(this: LayerRun) -> Found:
    """q, k and v in bfloat16 against float64 of the same numbers."""
    rows = []
    for T in (CHUNK, MIDDLE):
        drawn = draw(T)
        narrow = {name: drawn[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
        wide = {name: x.astype(np.float32) for name, x in narrow.items()}
        found, wanted = run(this, drawn | narrow), _exact(drawn | wide)
        rows.append(row(f"T = {T}", *_far(found, wanted), limit=NARROW_LIMIT))
    return rows, "the operator, with outputs in bfloat16"


def packed(this: LayerRun) -> Found:
    """Sequences one after another against each by itself, clean and with one of them all NaN."""
    drawn = draw(sum(PACKED) + BEHIND, states=len(PACKED))
    at = np.cumsum([0, *PACKED])
    spans = [slice(*span) for span in itertools.pairwise(at.tolist())]
    alone = [_exact(_tokens(drawn, s, i)) if PACKED[i] else None for i, s in enumerate(spans)]

    def compared(drawn: Drawn, but: int | None = None) -> list[list[float]]:
        """Outputs and state of every sequence but one, each to itself alone."""
        o, S = run(this, drawn, cu_seqlens=at.astype(np.int32))
        behind = np.inf if np.any(o[:, at[-1] :]) else 0.0
        found = []
        for i, (span, wanted) in enumerate(zip(spans, alone, strict=True)):
            if i == but:
                continue
            if wanted is None:
                found.append([behind, same(S[i], drawn["initial_state"][i])])
            else:
                out, state = _far((o[:, span], S[i : i + 1]), wanted)
                found.append([max(out, behind), state])
        return found

    clean = zip(PACKED, compared(drawn), strict=True)
    rows = [row(f"{n} tokens", *values) for n, values in clean]
    for i, span in enumerate(spans):
        others = compared(_spoilt(drawn, span, i), i)
        rows.append(row(f"others, NaN in {PACKED[i]}", *map(max, zip(*others, strict=True))))
    every = compared(_spoilt(drawn, slice(at[-1], None), None))
    rows.append(row("all, NaN behind the last", *map(max, zip(*every, strict=True))))
    return rows, f"{list(PACKED)} and {BEHIND} tokens behind them"


def chunk_size(this: LayerRun) -> Found:
    """Every size against float64 and against every other."""
    drawn = draw(MIDDLE)
    found = {"float64": _exact(drawn)}
    found |= {f"{C}": run(this, drawn, chunk_size=C) for C in CHUNK_SIZES}
    rows = [
        row(f"{b} to {a}", *_far(found[b], found[a])) for a, b in itertools.combinations(found, 2)
    ]
    return rows, f"{MIDDLE} tokens"


def adversarial(this: LayerRun) -> Found:
    """Inputs on which chunked forms have failed, each in chunks of every size."""
    rows = []
    for name, drawn in hard_cases().items():
        sizes = CHUNK_SIZES if drawn["v"].shape[1] == MIDDLE else (CHUNK,)
        wanted = _exact(drawn)
        each = [_far(run(this, drawn, chunk_size=C), wanted) for C in sizes]
        rows.append(row(name, *map(max, zip(*each, strict=True))))
    rows += gate_far_above_softplus(this)
    return rows, f"{len(rows)} inputs, the first of {MIDDLE} tokens in chunks of every size"


def drift8192(this: LayerRun) -> Found:
    """Weak decay over many tokens: the worst chunk by its own largest value, and the end."""
    weak = -np.exp(np.random.default_rng(1).uniform(-12, -7, (1, LONG, G)))
    drawn = draw(LONG, heads=1, g=weak)
    (o, S), (exact_o, exact_S) = run(this, drawn), _exact(drawn)
    chunks = [slice(t, t + CHUNK) for t in range(0, LONG, CHUNK)]
    each = [far(o[:, c], exact_o[:, c]) for c in chunks]
    worst = int(np.argmax(each))
    rows = [
        row(f"chunk {worst} of {len(chunks)}", each[worst]),
        row(f"after {LONG} tokens", S=far(S, exact_S)),
    ]
    return rows, f"{LONG} tokens, g from {weak.min():.1e} to {weak.max():.1e}"


def draw(T: int, states: int = 1, heads: int = HK, **changed: Any) -> Drawn:
    """Operands for ``heads`` key heads: gates from none to strong, live states, or ``changed``."""
    rng = np.random.default_rng((T, states))
    HV = heads * G
    q, k = rng.normal(size=(2, 1, T, heads, K))
    made = {"q": q, "k": k, "v": rng.normal(size=(1, T, HV, V))}
    made["g"] = -np.exp(rng.uniform(-9, 3, (1, T, HV)))
    made["beta"] = rng.uniform(0, 1, (1, T, HV))
    made["initial_state"] = rng.normal(size=(states, HV, K, V))
    return {name: np.asarray(x, np.float32) for name, x in (made | changed).items()}


def run(this: LayerRun, drawn: Drawn, **options: Any) -> Result:
    """The operator, which normalises q and k; chunks that the kernels have not run on xla."""
    backend = this.backend if options.get("chunk_size", CHUNK) == CHUNK else "xla"
    o, S = prefill_run._rule(**drawn, use_qk_l2norm=True, backend=backend, **options)
    return np.asarray(o, np.float32), np.asarray(S)


def hard_cases() -> dict[str, Drawn]:
    """Operands by the name of what is hard about them."""
    T, HV = MIDDLE, HK * G
    t, every = np.arange(T)[None, :, None], np.ones((1, T, HV))
    plain, rng = draw(T), np.random.default_rng(2)
    first = np.zeros((1, T, HK, K))
    first[..., 0] = 1
    common = rng.normal(size=(1, 1, 1, K))
    near = _unit(common + 0.3 * rng.normal(size=(2, LONG, 1, K)))[:, None]
    weak = -np.exp(rng.uniform(-9, -2, (1, T, HV)))
    gates = rng.uniform(-0.034, -0.012, (1, LONG, G))
    gap = ((t >= 10) & (t < 20))[..., None]
    return {
        "g = 0": draw(T, g=0 * every),
        "g = 0 on every other token": draw(T, g=np.where(t % 2, 0, plain["g"])),
        "decay 1e-12 a token": draw(T, g=np.log(1e-12) * every),
        "g = -90 first in every chunk": draw(
            T, g=np.where(t % min(CHUNK_SIZES), -1e-3, -90) * every
        ),
        "g = -5000 once": draw(T, g=np.where(t == T // 3, -5000, -1e-2) * every),
        "q and k of length 1e-3": draw(T, q=1e-3 * _unit(plain["q"]), k=1e-3 * _unit(plain["k"])),
        "zero q and k": draw(T, q=np.where(gap, 0, plain["q"]), k=np.where(gap, 0, plain["k"])),
        "beta = 0": draw(T, beta=0 * every, g=weak),
        "beta = 1": draw(T, beta=every, g=weak),
        "one key, beta 0.835": draw(T, q=first, k=first, g=-1e-3 * every, beta=0.835 * every),
        f"q·k near 0.9, {LONG} tokens": draw(
            LONG, heads=1, q=near[0], k=near[1], g=gates, beta=np.ones((1, LONG, G))
        ),
    }


def gate_far_above_softplus(this: LayerRun) -> list[Row]:
    """A small layer with ``a + dt_bias`` near 95, and decays from weak to strong."""
    cfg = drift_config(this.backend)
    rates = np.linspace(1e-3, 1, cfg.num_v_heads)
    changed = {"dt_bias": np.full_like(rates, 95), "A_log": np.log(rates)}
    weights = draw_weights(cfg, 0) | {n: x.astype(np.float32) for n, x in changed.items()}
    small = LayerRun.of(cfg, weights, this.backend)
    exact = small.exact
    wanted = (exact["OUT"], exact["S"][-1], exact["HIST"][-1])
    found = one(*small.prefill(small.xs[None]))
    return [pass_row("a + dt_bias near 95, a layer", found, wanted)]


def _far(found: Result, wanted: Result) -> list[float]:
    return [far(x, y) for x, y in zip(found, wanted, strict=True)]


def _exact(drawn: Drawn) -> Result:
    return oracle.recurrent_gated_delta_rule(**drawn, use_qk_l2norm=True)


def _tokens(drawn: Drawn, span: slice, i: int) -> Drawn:
    """One of the packed sequences."""
    cut = {n: x[:, span] for n, x in drawn.items() if n != "initial_state"}
    return cut | {"initial_state": drawn["initial_state"][i : i + 1]}


def _spoilt(drawn: Drawn, span: slice, i: int | None) -> Drawn:
    """NaN in the tokens of a span and in one state."""
    spoilt = {n: x.copy() for n, x in drawn.items()}
    for n, x in spoilt.items():
        if n != "initial_state":
            x[:, span] = np.nan
        elif i is not None:
            x[i] = np.nan
    return spoilt


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)
