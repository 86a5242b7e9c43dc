"""Sequences of a small vocabulary in a pool, and what recomputing each of them from zeros gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax as gdn
from tests.support.tools import assert_same_bits

CFG = gdn.GDNConfig(64, 2, 4, 16, 8, conv_width=3)
L, N, B, TD, LAYER = 2, 4, 2, 3, 1
BANK = gdn.LayerBank(CFG, L).preload(LAYER, gdn.init_params(jax.random.key(0), CFG))
VOCABULARY = jnp.asarray(np.random.default_rng(0).normal(size=(8, CFG.d_model)), jnp.float32)
IDLE = -1

step = jax.jit(
    lambda pool, x, read, write: BANK.step_slots(pool, LAYER, x, read, write_slots=write)
)
draft = jax.jit(
    lambda pool, xs, slots, lengths, parents, scheme: BANK.draft_slots(
        pool, LAYER, xs, slots, lengths=lengths, parents=parents, scheme=scheme
    ),
    static_argnames="scheme",
)
commit = jax.jit(lambda pool, record, slots, taken: pool.commit({LAYER: record}, slots, taken))
plain = jax.jit(functools.partial(BANK.step, layer=LAYER))


def new_pool() -> gdn.StatePool:
    return gdn.StatePool.create(CFG, L, N)


@functools.cache
def recomputed(tokens: tuple[int, ...]) -> tuple[np.ndarray, gdn.GDNState]:
    """The last output and the state of a sequence, decoded from zeros beside an idle row."""
    if not tokens:
        return np.zeros(CFG.d_model, np.float32), BANK.init_state(B)
    _, state = recomputed(tokens[:-1])
    y, state = plain(state, x=jnp.stack([VOCABULARY[tokens[-1]]] * B))
    return np.asarray(y[0]), state


def assert_holds(pool: gdn.StatePool, slot: int, tokens: tuple[int, ...]) -> None:
    _, state = recomputed(tokens)
    for name in ("S", "conv_hist"):
        found, expected = getattr(pool, name)[:, slot], getattr(state, name)[:, 0]
        assert_same_bits(found, expected, f"{name} of slot {slot} after {tokens}")


def rows(*slots: int) -> jax.Array:
    return jnp.asarray(slots, jnp.int32)
