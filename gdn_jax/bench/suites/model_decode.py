"""Steps of a whole model after a number of tokens, as generation runs them."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.bench.rows import MODEL_DECODE
from gdn_jax.bench.suites import model_work as work
from gdn_jax.bench.suites.layer import DISTINCT
from gdn_jax.bench.workload import Prepared, Workload
from gdn_jax.layer.state import GDNState
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.forward import forward_by_block
from gdn_jax.models.generation import device
from gdn_jax.models.generation.host import LOOK
from gdn_jax.models.generation.sampling import Sampling
from gdn_jax.models.route import Call

LIMIT = 5e-2
"""Limit of :func:`error`, in nats. Over 64 layers, on a CPU, rounding attention's operands to
bfloat16 costs 0.01; positions that are off by one, or one layer's wrong weights, 0.36 or more.
"""
_STATE = 0.3
"""The size of a state's numbers after many tokens."""


def workload(cfg: ModelConfig, backend: str, batch: int, position: int) -> Workload:
    """:func:`gdn_jax.models.generation.device.decode`, greedy; a link is one token of every row."""
    return Workload(
        MODEL_DECODE,
        backend,
        f"{work.shape(cfg)}_p{position}",
        batch,
        work.decode_bytes(cfg, batch, position),
        work.decode_flops(cfg, batch, position),
        LOOK,
        functools.partial(_make, cfg, backend, batch, position),
        LIMIT,
        "nats",
        tokens=batch,
    )


def _make(cfg: ModelConfig, backend: str, batch: int, position: int) -> Prepared:
    model = work.made(cfg, backend)
    room = work.room_for(position + LOOK)
    reach = device.step_reach(model.route, batch, position + LOOK, room)
    call = Call(cfg, model.route, reach=reach)
    keep, stops, sampling = jnp.ones(batch, bool), jnp.full(4, -1, jnp.int32), Sampling.of()
    start = jnp.full(batch, position, jnp.int32)
    distinct = 1 if batch == 1 else DISTINCT

    def run(rows: device.Rows) -> tuple[device.Rows, device.Chosen]:
        return device.decode(model.params, rows, keep, sampling, stops, call, LOOK)

    def again(rows: device.Rows) -> device.Rows:
        """Again from the same position; its array is new, because each call donates it."""
        cache = dataclasses.replace(rows.cache, length=jnp.copy(start))
        return run(dataclasses.replace(rows, cache=cache))[0]

    rows, chosen = run(drawn(cfg, distinct, batch, position))
    return Prepared(
        lambda: error(chosen, exact(cfg, backend, distinct, position)),
        again,
        rows,
        f"{LOOK} tokens of every row and their log-probabilities to float32 on xla",
    )


def drawn(cfg: ModelConfig, distinct: int, batch: int, position: int) -> device.Rows:
    """``batch`` rows that hold ``position`` tokens; they repeat ``distinct`` different rows.

    Keys and values beyond the position are drawn as well: no token may see them.
    """
    like = jax.eval_shape(
        lambda: ModelCache.zeros(cfg, distinct, work.room_for(position + LOOK), jnp.bfloat16)
    )
    rows = np.arange(batch) % distinct
    keys = (jax.random.key(seed, impl="rbg") for seed in itertools.count())
    S = _normal(next(keys), _STATE, like.states.S)[:, rows]
    hist = _normal(next(keys), 1.0, like.states.conv_hist)[:, rows]
    k, v = (tuple(_normal(next(keys), 1.0, x)[rows] for x in kind) for kind in (like.k, like.v))
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, distinct)[rows]
    cache = ModelCache(GDNState(S, hist), k, v, jnp.full(batch, position, jnp.int32))
    made, left = jnp.zeros(batch, jnp.int32), jnp.full(batch, 1 << 20, jnp.int32)
    return device.Rows(cache, jnp.asarray(ids, jnp.int32), made, left, None)


@functools.partial(jax.jit, static_argnames="like")
def _normal(key: jax.Array, size: float, like: jax.ShapeDtypeStruct) -> jax.Array:
    return size * jax.random.normal(key, like.shape, like.dtype)


@functools.lru_cache(maxsize=1)
def exact(cfg: ModelConfig, backend: str, distinct: int, position: int) -> jax.Array:
    """Log-probabilities [LOOK, distinct, vocab]; each step takes the likeliest token of the last.

    Computed on XLA in float32 with the same bfloat16 keys, block by block.
    """
    params = work.made(cfg, backend).params
    rows = drawn(cfg, distinct, distinct, position)
    cache, token, found = rows.cache, rows.token, []
    for _ in range(LOOK):
        call = Call(cfg, logits="last")
        y, cache = forward_by_block(params, cache, token[:, None], None, call, tuned=False)
        found.append(jax.nn.log_softmax(y))
        token = jnp.argmax(y, axis=-1).astype(jnp.int32)
    return jnp.stack(found)


def error(chosen: device.Chosen, wanted: jax.Array) -> float:
    """How far the chosen tokens are from the reference's, in nats.

    The largest of two differences for any token: between its log-probability and the one that the
    reference gives it; between the latter and that of the reference's likeliest token. A row that
    chose another token than the reference is compared up to that token.
    """
    tokens, logprobs = map(np.asarray, chosen)
    if tokens.min() < 0 or not np.isfinite(logprobs).all():
        return math.inf
    rows = np.arange(tokens.shape[1]) % wanted.shape[1]
    best = np.asarray(wanted.max(axis=-1))[:, rows]
    likeliest = np.asarray(wanted.argmax(axis=-1))[:, rows]
    step = np.arange(len(tokens))[:, None]
    there = np.asarray(wanted[step, rows[None], tokens])
    apart = np.maximum(np.abs(logprobs - there), best - there)
    same = np.cumprod(tokens == likeliest, axis=0, dtype=bool)
    return float(np.max(apart, where=np.vstack([same[:1] | True, same[:-1]]), initial=0.0))
