"""Whole models: the bundled checkpoint against transformers, its batches and splits, and int4."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax
from gdn_jax.models.model import load
from gdn_jax.quant.q4array import Q4Array, dequantize
from gdn_jax.report.metrics import distance
from gdn_jax.report.progress import Stage
from gdn_jax.report.record import Report
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.model.run import LIMIT, ModelRun, verdict

BUNDLED = Path(gdn_jax.__file__).parent / "data" / "tiny_qwen35"
"""A checkpoint by transformers with all kinds of layers, and what transformers makes of it."""
PROMPT = 70
"""Tokens of the prefill; the other 64 are steps."""
CUTS = (1, 37, 64)
ROWS = ((0, 40), (60, 85), (90, 91))
"""Rows of a batch, as spans of the tokens."""
PROMPTS = ((0, 70), (30, 96), (60, 125))
"""Of a batch that is generated from; alone each runs the programs of the greedy check."""
NEW = 8
"""Tokens that each row of a batch generates."""
Found = tuple[float, str]
"""A check's value and detail."""


def run(report: Report, *, backend: str | None, stage: Stage) -> str:
    """Run every check of the suite on the bundled checkpoint, add it to the report.

    Returns the backend.
    """
    with stage("model"):
        this = bundled(backend)
    with stage("model.layers"):
        rows = report.tables["model"] = this.layers(this.expected["ids"][:PROMPT])
    report.checks.append(check("model.layers", *verdict(rows)))
    for name, measure in CHECKS.items():
        with stage(f"model.{name}"):
            value, detail = measure(this)
        limit = 0 if measure in _COUNTS else LIMIT
        report.checks.append(check(f"model.{name}", value, limit, detail))
    return this.model.backend


def bundled(backend: str | None) -> ModelRun:
    """The bundled checkpoint in float32, and what transformers makes of it."""
    with np.load(BUNDLED / "expected.npz") as file:
        expected = {name: file[name] for name in file.files}
    return ModelRun(load(BUNDLED, weights="f32", backend=backend), expected)


def transformers(this: ModelRun) -> Found:
    """A prefill and cached steps against those of transformers."""
    ids, wanted = this.expected["ids"], this.expected["logits"]
    found = this.walk(ids, [PROMPT, *range(PROMPT + 1, len(ids))])
    count = int(np.count_nonzero(found.argmax(-1) != wanted.argmax(-1)))
    worst = np.inf if count else distance(found, wanted).max_rel
    steps = len(ids) - PROMPT
    return worst, f"logits of {PROMPT} tokens at once and {steps} steps, {count} other choices"


def greedy(this: ModelRun) -> Found:
    """The most likely tokens, each behind the one before, against those of transformers."""
    wanted = this.expected["greedy"]
    (found,) = this.generate([this.expected["ids"][:PROMPT]], len(wanted))
    return _differences([found], [wanted]), f"{len(wanted)} tokens after {PROMPT}"


def split(this: ModelRun) -> Found:
    """A prefill in two parts against the whole of transformers."""
    ids, wanted = this.expected["ids"][:PROMPT], this.expected["logits"][:PROMPT]
    worst = max(distance(this.walk(ids, [cut]), wanted).max_rel for cut in CUTS)
    return worst, f"{PROMPT} tokens split at {', '.join(map(str, CUTS))}"


def batch(this: ModelRun) -> Found:
    """Rows of other lengths, and a step of each, against a batch of its own for each."""
    spans = [this.expected["ids"][slice(*row)] for row in ROWS]
    together = this.rows(spans)
    alone = [this.rows([ids])[0] for ids in spans]
    worst = max(distance(a, b).max_rel for a, b in zip(together, alone, strict=True))
    return worst, f"rows of {', '.join(str(len(ids)) for ids in spans)} tokens and a step of each"


def generate(this: ModelRun) -> Found:
    """Prompts generated from together against each by itself."""
    prompts = [this.expected["ids"][slice(*row)] for row in PROMPTS]
    together = this.generate(prompts, NEW)
    alone = [this.generate([ids], NEW)[0] for ids in prompts]
    sizes = ", ".join(str(len(ids)) for ids in prompts)
    return _differences(together, alone), f"{NEW} tokens behind each of {sizes}"


def q4(this: ModelRun) -> Found:
    """An int4 model against the same model with its int4 weights dequantised."""
    narrow = load(BUNDLED, weights="q4", backend="xla")
    wide = jax.tree.map(_wide, narrow.params, is_leaf=_is_q4)
    count = sum(map(_is_q4, jax.tree.leaves(narrow.params, is_leaf=_is_q4)))
    ids = this.expected["ids"][: PROMPT + 2]
    cuts = [PROMPT, PROMPT + 1]
    found, wanted = (this.replace(params).walk(ids, cuts) for params in (narrow.params, wide))
    worst = distance(found, wanted).max_rel if count else np.inf
    cost = distance(wanted, this.expected["logits"][: PROMPT + 2]).rms_rel
    return worst, f"{count} int4 matrices; int4 costs {cost:.2g} rms_rel of the logits here"


def _is_q4(x: object) -> bool:
    return isinstance(x, Q4Array)


def _wide(x: Any) -> Any:
    """In float32, which bfloat16 is part of: the form for which the programs are compiled."""
    return dequantize(x) if isinstance(x, Q4Array) else x.astype(jnp.float32)


def _differences(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> int:
    """Tokens that differ; a row of another length is all different."""
    pairs = zip(found, wanted, strict=True)
    return sum(
        int(np.count_nonzero(a != b)) if len(a) == len(b) else max(len(a), len(b)) for a, b in pairs
    )


_COUNTS = (greedy, generate)
CHECKS: dict[str, Callable[[ModelRun], Found]] = {
    measure.__name__: measure for measure in (transformers, greedy, split, batch, generate, q4)
}
STAGES = 2 + len(CHECKS)
