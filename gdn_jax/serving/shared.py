"""One pool for several threads: every change under a lock, its arrays updated in place."""

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from gdn_jax.config import GDNConfig
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState
from gdn_jax.serving.bank import LayerBank
from gdn_jax.serving.drafts import DraftRecord
from gdn_jax.serving.files import save_pool
from gdn_jax.serving.pool import StatePool, check_pool
from gdn_jax.serving.prefix import PrefixState
from gdn_jax.serving.rows import check_commit, commit_rows, step_rows
from gdn_jax.serving.table import Slots
from gdn_jax.types import Array


class SharedPool:
    """A :class:`StatePool` that changes in place, for several threads.

    **The lock.** One lock is held from the checks of a method until its work is queued on the
    device; only :meth:`export` and :meth:`save` hold it while they wait for the device. So every
    method sees the pool that the one before it left, and slots of different threads can be stepped,
    forked and freed at once: each sequence gets what it would get alone. The threads must agree on
    who uses which slot: the pool knows which slots are free, not whose the others are. A method
    that refuses its arguments changes nothing.

    **Ownership.** The arrays of ``pool`` are donated to the first change: it must not be used
    afterwards. :meth:`export` and :meth:`checkpoint` copy out what must outlive the next change.

    Raises:
        ShapeError: not a pool, or one whose arrays do not fit its configuration.
    """

    def __init__(self, pool: StatePool) -> None:
        check_pool("SharedPool", pool)
        self._pool, self._lock = pool, threading.Lock()

    def alloc(self, n: int) -> Array:
        """:meth:`StatePool.alloc`: int32 [n]."""
        return self._change(lambda pool: pool.alloc(n, donate=True))

    def free(self, slots: Slots) -> None:
        """:meth:`StatePool.free`."""
        self._change(lambda pool: (pool.free(slots), None))

    def reset(self, slots: Slots) -> None:
        """:meth:`StatePool.reset`."""
        self._change(lambda pool: (pool.reset(slots, donate=True), None))

    def fork(self, slot: Slots, n: int) -> Array:
        """:meth:`StatePool.fork`: int32 [n]."""
        return self._change(lambda pool: pool.fork(slot, n, donate=True))

    def copy(self, src: Slots, dst: Slots) -> None:
        """:meth:`StatePool.copy`."""
        self._change(lambda pool: (pool.copy(src, dst, donate=True), None))

    def branch(self, checkpoint: PrefixState, n: int) -> Array:
        """:meth:`StatePool.branch`: int32 [n]."""
        return self._change(lambda pool: pool.branch(checkpoint, n, donate=True))

    def import_(self, slots: Slots, arrays: Mapping[str, np.ndarray]) -> None:
        """:meth:`StatePool.import_`."""
        self._change(lambda pool: (pool.import_(slots, arrays, donate=True), None))

    def checkpoint(self, slot: Slots) -> PrefixState:
        """:meth:`StatePool.checkpoint`."""
        with self._lock:
            return self._pool.checkpoint(slot)

    def export(self, slots: Slots) -> dict[str, np.ndarray]:
        """:meth:`StatePool.export`."""
        with self._lock:
            return self._pool.export(slots)

    def save(self, path: str | os.PathLike[str]) -> None:
        """:func:`save_pool`."""
        with self._lock:
            save_pool(path, self._pool)

    @property
    def used(self) -> np.ndarray:
        """:attr:`StatePool.used`."""
        return self._pool.used

    @property
    def occupancy(self) -> int:
        """:attr:`StatePool.occupancy`."""
        return self._pool.occupancy

    def step(
        self,
        bank: LayerBank,
        layer: int,
        x: Array,
        slots: Array,
        *,
        write_slots: Array | None = None,
        backend: str | None = None,
    ) -> Array:
        """:meth:`LayerBank.step_slots`, compiled: y [B, D]."""

        def step(pool: StatePool) -> tuple[StatePool, Array]:
            params, rows, chosen = bank.ready_to_step(pool, layer, x, slots, write_slots, backend)
            y, states = _step(pool.states, params, layer, x, rows, bank.cfg, chosen)
            return dataclasses.replace(pool, **vars(states)), y

        return self._change(step)

    def draft(
        self, bank: LayerBank, layer: int, xs: Array, slots: Array, **options: Any
    ) -> tuple[Array, DraftRecord]:
        """:meth:`LayerBank.draft_slots` with its ``options``."""
        with self._lock:
            return bank.draft_slots(self._pool, layer, xs, slots, **options)

    def commit(self, records: Mapping[int, DraftRecord], slots: Array, accepted: Array) -> None:
        """:meth:`StatePool.commit`, compiled."""

        def commit(pool: StatePool) -> tuple[StatePool, None]:
            rows, taken = check_commit(
                "SharedPool.commit", pool.table, pool.num_layers, records, slots, accepted
            )
            states = _commit(pool.states, dict(records), rows, taken)
            return dataclasses.replace(pool, **vars(states)), None

        self._change(commit)

    def _change(self, change: Callable[[StatePool], tuple[StatePool, Any]]) -> Any:
        with self._lock:
            self._pool, result = change(self._pool)
            return result


@functools.partial(jax.jit, static_argnames=("cfg", "backend"), donate_argnames="states")
def _step(
    states: GDNState,
    params: GDNParams,
    layer: Array | int,
    x: Array,
    rows: tuple[Array, Array],
    cfg: GDNConfig,
    backend: str,
) -> tuple[Array, GDNState]:
    return step_rows(params, states, layer, x, rows, cfg, backend)


_commit = jax.jit(commit_rows, donate_argnames="states")
