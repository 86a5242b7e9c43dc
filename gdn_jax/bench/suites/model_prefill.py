"""A whole model's prompt up to its first token."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.bench.rows import MODEL_PREFILL
from gdn_jax.bench.slope import Timing, blocking
from gdn_jax.bench.suites import model_work as work
from gdn_jax.bench.workload import Prepared, Workload
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.forward import forward_by_block
from gdn_jax.models.generation import device
from gdn_jax.models.generation.sampling import Sampling
from gdn_jax.models.model import Model
from gdn_jax.models.route import Call
from gdn_jax.report.metrics import distance

LIMIT = 0.2
"""Limit of the logits' max_rel. Over 64 layers of width 256, on a CPU, products with bfloat16
operands cost 0.08; one layer's wrong weights, or positions that are off by two, 0.5 or more.
"""
_TIMES = 3
"""The most measurements: each takes seconds, and their times are close together."""


def workload(cfg: ModelConfig, backend: str, tokens: int) -> Workload:
    """:func:`gdn_jax.models.generation.device.prefill` and the choice of a token; calls wait."""
    return Workload(
        MODEL_PREFILL,
        backend,
        f"{work.shape(cfg)}_t{tokens}",
        1,
        work.prefill_bytes(cfg, tokens),
        work.prefill_flops(cfg, tokens),
        1,
        functools.partial(_make, cfg, backend, tokens),
        LIMIT,
        measure=blocking,
        tokens=tokens,
        matrix=True,
    )


def _make(cfg: ModelConfig, backend: str, tokens: int) -> Prepared:
    model, room = work.made(cfg, backend), work.room_for(tokens)
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, tokens).astype(np.int32)
    call, sampling, stops = Call(cfg, model.route), Sampling.of(), jnp.full(4, -1, jnp.int32)

    def prompt() -> tuple[device.Chosen, jax.Array]:
        cache = ModelCache.zeros(cfg, 1, room, model.kv_dtype)
        logits, cache = device.prefill(model.params, cache, [ids], room, call)
        token, made, left = (jnp.full(1, n, jnp.int32) for n in (0, 0, 1))
        rows = device.Rows(cache, token, made, left, None)
        return device.first(rows, logits, sampling, stops)[1], logits

    chosen, logits = prompt()

    def check() -> float:
        if int(chosen.tokens[0, 0]) != int(jnp.argmax(logits[0])):
            return math.inf
        return distance(np.asarray(logits), np.asarray(exact(model, ids, room))).max_rel

    def run(_: Any) -> device.Chosen:
        return prompt()[0]

    def measured(repetitions: int) -> Timing:
        return blocking(run, None, repetitions=min(repetitions, _TIMES))

    return Prepared(check, run, None, "logits of the last token to float32 on xla", measured)


def exact(model: Model, ids: np.ndarray, room: int) -> jax.Array:
    """Logits [1, vocab] after a prompt, on XLA in float32 with bfloat16 keys."""
    cache, y = ModelCache.zeros(model.cfg, 1, room, model.kv_dtype), None
    for start, width in device.pieces_of([len(ids)], room):
        piece = device.padded([ids], start, width)
        call = Call(model.cfg, logits="last")
        y, cache = forward_by_block(model.params, cache, *piece, call, tuned=False)
    assert y is not None
    return y
