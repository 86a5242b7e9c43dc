"""A whole model's prompts up to their first token, and the memory that a long one takes."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.bench import model_work as work
from gdn_jax.bench.rows import MODEL_PREFILL
from gdn_jax.bench.slope import Timing, blocking
from gdn_jax.bench.subject import Prepared, Subject
from gdn_jax.models import steps
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.forward import Call, prefill_blocks
from gdn_jax.models.generate import STEPS
from gdn_jax.models.memory import peak_bytes
from gdn_jax.models.model import Model
from gdn_jax.models.sampling import Sampling
from gdn_jax.verify.metrics import distance

LIMIT = 0.2
"""max_rel of logits. Over 64 layers products with bfloat16 operands cost 0.08 of them, one layer's
wrong weights or positions that are off by two 0.5 or more, at a width of 256 on a CPU.
"""
WHOLE = 8192
"""Tokens at most that the reference computes all of."""
_TIMES = 3
"""Measurements at most: each takes seconds, and they lie close together."""


def subject(cfg: ModelConfig, backend: str, tokens: int, room: int, *, after: bool) -> Subject:
    """:func:`gdn_jax.models.steps.prefill` and the choice of a token, waited for.

    Args:
        cfg, backend: the model.
        tokens: of the prompt.
        room: of its cache; prompts of one room share their programs.
        after: whether some tokens follow before the device's memory is looked at.
    """
    return Subject(
        MODEL_PREFILL,
        backend,
        f"{work.shape(cfg)}_t{tokens}",
        1,
        work.prefill_bytes(cfg, tokens),
        work.prefill_flops(cfg, tokens),
        1,
        functools.partial(_make, cfg, backend, tokens, room, after),
        LIMIT,
        measure=blocking,
        tokens=tokens,
        matrix=True,
    )


def _make(cfg: ModelConfig, backend: str, tokens: int, room: int, after: bool) -> Prepared:
    before = peak_bytes()
    model = work.made(cfg, backend)
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, tokens).astype(np.int32)
    call, sampling, stops = Call(cfg, model.route), Sampling.of(), jnp.full(4, -1, jnp.int32)

    def prompt() -> tuple[steps.Rows, steps.Chosen, jax.Array]:
        cache = ModelCache.zeros(cfg, 1, room, model.kv_dtype)
        logits, cache = steps.prefill(model.params, cache, [ids], room, call)
        token, made, left = (jnp.full(1, n, jnp.int32) for n in (0, 0, 1 + STEPS))
        rows = steps.Rows(cache, token, made, left, None)
        return *steps.first(rows, logits, sampling, stops), logits

    rows, chosen, logits = prompt()
    if after:
        how = call._replace(reach=steps.reach_of(tokens + STEPS, room))
        keep = jnp.ones(1, bool)
        jax.block_until_ready(
            steps.decode(model.params, rows, keep, sampling, stops, how, STEPS)[1]
        )
    del rows
    jax.block_until_ready(logits)
    peak = peak_bytes()

    def check() -> float:
        if int(chosen.tokens[0, 0]) != int(jnp.argmax(logits[0])):
            return math.inf
        return distance(np.asarray(logits), np.asarray(exact(model, ids, room))).max_rel

    def run(_: Any) -> steps.Chosen:
        return prompt()[1]

    def measured(repetitions: int) -> Timing:
        return blocking(run, None, repetitions=min(repetitions, _TIMES))

    detail = "logits of the last token to float32 on xla"
    if tokens > WHOLE:
        detail += f", whose last {tokens - _begin(tokens)} tokens run on what the others left"
    raised = before is not None and peak is not None and peak > before
    return Prepared(check, run, None, detail, measured, peak if raised else None)


def exact(model: Model, ids: np.ndarray, room: int) -> jax.Array:
    """Logits [1, vocab] behind a prompt on XLA in float32, attention to bfloat16 keys.

    Of more tokens than WHOLE only the last piece is, behind those before it on the model's route.
    """
    cfg, begin = model.cfg, _begin(len(ids))
    cache = ModelCache.zeros(cfg, 1, room, model.kv_dtype)
    if begin:
        _, cache = steps.prefill(model.params, cache, [ids[:begin]], room, Call(cfg, model.route))
    y = None
    for start, width in steps.pieces_of([len(ids) - begin]):
        piece = steps.padded([ids[begin:]], start, width)
        y, cache = prefill_blocks(model.params, cache, *piece, Call(cfg, logits="last"))
    assert y is not None
    return y


def _begin(tokens: int) -> int:
    """How many tokens of a prompt the reference takes from the model's own route."""
    return 0 if tokens <= WHOLE else steps.pieces_of([tokens])[-1][0]
