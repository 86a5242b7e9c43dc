"""States of prefixes: a handle on one, and a store of many within a budget of bytes."""

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError, UnknownNameError
from gdn_jax.types import Array

COMPRESSIONS = ("float16", "int8")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrefixState:
    """What one slot of a pool held: S float32 [L, HV, K, V], conv_hist float32 [L, W-1, C].

    An immutable pytree of its own arrays: the slot may go on, be freed or be handed out again.
    :meth:`StatePool.checkpoint` creates it, and :meth:`StatePool.branch` starts slots from it.
    """

    cfg: GDNConfig = dataclasses.field(metadata={"static": True})
    S: Array = dataclasses.field(repr=False)
    conv_hist: Array = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.S.nbytes + self.conv_hist.nbytes


Checkpoint = PrefixState
"""The old name of :class:`PrefixState`."""


@dataclasses.dataclass(frozen=True)
class _Packed:
    """``S ≈ codes · scale``, one float32 scale for the V columns of a row of S."""

    cfg: GDNConfig
    codes: Array
    scale: Array
    conv_hist: Array
    error: float

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.conv_hist.nbytes


class PrefixStates:
    """Prefix states by the caller's keys; those used longest ago are dropped to stay in the budget.

    ``compress`` keeps S in fewer bytes: ``"float16"`` (2 bytes a number) or ``"int8"`` (1 byte),
    with one float32 scale for the V numbers of a row, ``scale = max|row|`` or a 127th of it.
    :meth:`get` always gives float32; :meth:`error` says what the compression cost. The history
    stays float32. By default nothing is compressed and every bit is kept.

    Safe from several threads: one lock is held during every method, and a method waits for the
    device only to measure an error.

    Args:
        budget: the most bytes to keep.
        compress: None, "float16" or "int8".

    Raises:
        ShapeError: ``budget`` is not a whole number from 0 up.
        UnknownNameError: no such compression.
    """

    def __init__(self, budget: int, *, compress: str | None = None) -> None:
        if type(budget) is not int or budget < 0:
            raise ShapeError(f"PrefixStates: budget is {budget!r}; needed a number of bytes")
        if compress not in (None, *COMPRESSIONS):
            there = ", ".join(COMPRESSIONS)
            raise UnknownNameError(f"PrefixStates: no compression {compress!r}; there are {there}")
        self.budget, self.compress = budget, compress
        self._kept: collections.OrderedDict[Hashable, PrefixState | _Packed] = (
            collections.OrderedDict()
        )
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, at most the budget."""
        with self._lock:
            return self._nbytes()

    def keys(self) -> list[Hashable]:
        """The keys, the one used longest ago first."""
        with self._lock:
            return list(self._kept)

    def put(self, key: Hashable, checkpoint: PrefixState) -> None:
        """Keep a checkpoint under ``key``, in place of an older one, as the one used last.

        Raises:
            ShapeError: not a checkpoint, one that is larger than the budget, or one that is to be
                compressed and is not finite; nothing changes.
        """
        if not isinstance(checkpoint, PrefixState):
            found = type(checkpoint).__name__
            raise ShapeError(f"PrefixStates.put: {key!r} is a {found}; needed gdn_jax.PrefixState")
        entry = checkpoint
        if self.compress is not None:
            entry = _pack(key, checkpoint, self.compress)
        if entry.nbytes > self.budget:
            needed = f"needed at most the budget, {self.budget}"
            raise ShapeError(f"PrefixStates.put: {key!r} takes {entry.nbytes} bytes; {needed}")
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = entry
            while self._nbytes() > self.budget:
                self._kept.popitem(last=False)

    def get(self, key: Hashable) -> PrefixState | None:
        """The checkpoint of a key, which is now the one used last; None if it is not kept."""
        with self._lock:
            entry = self._kept.get(key)
            if entry is None:
                return None
            self._kept.move_to_end(key)
        return _unpack(entry)

    def discard(self, key: Hashable) -> None:
        """Drop a key, if it is kept."""
        with self._lock:
            self._kept.pop(key, None)

    def error(self, key: Hashable) -> float:
        """``max|S - kept| / max|S|`` of what a key has; 0 where nothing is compressed.

        Raises:
            KeyError: the key is not kept.
        """
        with self._lock:
            entry = self._kept[key]
        return entry.error if isinstance(entry, _Packed) else 0.0

    def _nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._kept.values())


def _pack(key: Hashable, checkpoint: PrefixState, kind: str) -> _Packed:
    codes, scale, error = _compressed(checkpoint.S, kind)
    if not math.isfinite(error):
        raise ShapeError(f"PrefixStates.put: {key!r} is not finite; needed a finite S for {kind}")
    return _Packed(checkpoint.cfg, codes, scale, checkpoint.conv_hist, float(error))


def _unpack(entry: PrefixState | _Packed) -> PrefixState:
    if isinstance(entry, PrefixState):
        return entry
    return PrefixState(entry.cfg, _expanded(entry.codes, entry.scale), entry.conv_hist)


@functools.partial(jax.jit, static_argnames="kind")
def _compressed(S: Array, kind: str) -> tuple[Array, Array, Array]:
    """Codes, scales, and ``max|S - codes · scale| / max|S|``."""
    largest = jnp.max(jnp.abs(S), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1.0) / (127 if kind == "int8" else 1)
    codes = S / scale
    codes = jnp.round(codes).astype(jnp.int8) if kind == "int8" else codes.astype(jnp.float16)
    # Without it, the product is fused with the difference, and not rounded as `get` rounds it.
    given = lax.optimization_barrier(_expanded(codes, scale))
    apart = jnp.max(jnp.abs(S - given))
    return codes, scale, apart / jnp.maximum(jnp.max(largest), jnp.finfo(jnp.float32).tiny)


@jax.jit
def _expanded(codes: Array, scale: Array) -> Array:
    return codes.astype(jnp.float32) * scale
