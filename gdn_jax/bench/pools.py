"""Pools in which every slot's content is known, so that an unwanted change can be seen."""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.bench.suites.layer import DISTINCT, draw_state
from gdn_jax.config import GDNConfig
from gdn_jax.layer.state import GDNState
from gdn_jax.serving.pool import StatePool
from gdn_jax.serving.table import SlotTable


@dataclasses.dataclass(frozen=True)
class Contents:
    """What the slots of each of ``layers`` layers hold at the start.

    Seven sequences are drawn. Slot n holds the one of number ``held[n] % 7`` with ``held[n] // 7``
    added to every element, ``held`` int32 [N]; what is added is zero only in the slots that have
    rows. ``rows`` int32 [links, B] are those slots in a random order: row b of each link has
    sequence b % 7.
    """

    cfg: GDNConfig
    layers: int
    held: np.ndarray
    rows: np.ndarray

    @classmethod
    def draw(cls, cfg: GDNConfig, layers: int, slots: int, batch: int, links: int = 1) -> Self:
        """Draw the contents of a pool of which ``links`` times ``batch`` slots have rows."""
        order = np.random.default_rng(slots).permutation(slots).astype(np.int32)
        rows = order[: links * batch].reshape(links, batch)
        held = np.arange(DISTINCT, slots + DISTINCT, dtype=np.int32)
        held[rows] = np.arange(batch, dtype=np.int32) % DISTINCT
        return cls(cfg, layers, held, rows)

    def pool(self) -> StatePool:
        """A pool with these contents, all of its slots in use."""
        states = _filled(draw_state(self.cfg, DISTINCT)[0], self.held, self.layers)
        table, _ = SlotTable.create(self.held.size).alloc("bench", self.held.size)
        return StatePool(self.cfg, states.S, states.conv_hist, jax.tree.map(jnp.asarray, table))

    def changed(self, pool: StatePool, *, but: np.ndarray) -> int:
        """How many slots of all layers, except those in ``but``, differ from the start in a bit."""
        asked = np.ones(self.held.size, bool)
        asked[but.ravel()] = False
        drawn = draw_state(self.cfg, DISTINCT)[0]
        return int(_unlike(GDNState(pool.S, pool.conv_hist), drawn, self.held, asked))


def rows_of(pool: StatePool, rows: jax.Array) -> GDNState:
    """The first layer's states of these slots, on the host."""
    return jax.tree.map(lambda x: np.asarray(x[0, rows]), GDNState(pool.S, pool.conv_hist))


@functools.partial(jax.jit, static_argnames="layers")
def _filled(drawn: GDNState, held: jax.Array, layers: int) -> GDNState:
    def fill(x: jax.Array) -> jax.Array:
        added = (held // DISTINCT).astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        filled = x[held % DISTINCT] + added
        return jnp.broadcast_to(filled, (layers, *filled.shape))

    return jax.tree.map(fill, drawn)


@jax.jit
def _unlike(found: GDNState, drawn: GDNState, held: jax.Array, asked: jax.Array) -> jax.Array:
    def unlike(a: jax.Array, b: jax.Array) -> jax.Array:
        bits = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in (a, b))
        return jnp.any(jnp.not_equal(*bits), axis=tuple(range(2, a.ndim)))

    start = _filled(drawn, held, layers=found.S.shape[0])
    either = jnp.logical_or(*jax.tree.leaves(jax.tree.map(unlike, found, start)))
    return jnp.count_nonzero(either & asked[None])
