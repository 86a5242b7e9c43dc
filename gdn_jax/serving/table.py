"""Which slots of a pool are free: a small immutable value that the host keeps."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax._core.checks import check_array
from gdn_jax.errors import PoolFullError, SlotError
from gdn_jax.types import Array

Slots = Any
"""One slot, or int32 [n]: a JAX or NumPy array, or a list of ints."""

_LAST_TURN = np.iinfo(np.int32).max

IDLE = -1
"""The slot of a row without a sequence: nothing is read, nothing is written."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlotTable:
    """Two int32 [N] arrays that are never written to; every change makes a new table. A pytree.

    ``generation`` is 0 for a slot never used and grows by one with every ``alloc`` and ``free``,
    so that it is odd exactly while the slot is in use, even if it wraps.
    ``turn`` orders the free slots: the one longest free is handed out first, ties by number.

    A slot is a plain number, so an old number cannot be told from a new one once the slot has
    been handed out again. Two things limit this: a freed slot waits until all other free slots have
    been used, and :meth:`check` compares generations for those who keep them.
    """

    generation: np.ndarray
    turn: np.ndarray

    @classmethod
    def create(cls, num_slots: int) -> Self:
        """Every slot free."""
        return cls(*(_frozen(np.zeros(num_slots, np.int32)) for _ in range(2)))

    @property
    def used(self) -> np.ndarray:
        """Bool [N]: which slots are in use."""
        return self.generation % 2 == 1

    def on_host(self, where: str) -> Self:
        """The table as NumPy arrays.

        Raises:
            SlotError: the table is traced.
        """
        if _traced(self):
            raise SlotError(f"{where}: the pool is traced; needed a call outside jit")
        return jax.tree.map(np.asarray, self)

    def alloc(self, where: str, n: int) -> tuple[Self, np.ndarray]:
        """Mark ``n`` free slots as in use; int32 [n].

        Raises:
            SlotError: ``n`` is not a whole number from 0 up.
            PoolFullError: fewer than ``n`` slots are free.
        """
        if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 0:
            raise SlotError(f"{where}: n is {n!r}; needed a whole number from 0 up")
        free = np.flatnonzero(~self.used)
        if n > free.size:
            raise PoolFullError(
                f"{where}: {free.size} of {self.used.size} slots are free; needed {n}"
            )
        slots = free[np.argsort(self.turn[free], kind="stable")][:n].astype(np.int32)
        return self._counted(slots, self.turn), slots

    def free(self, where: str, slots: np.ndarray) -> Self:
        """Mark these slots as free; errors as :meth:`check`."""
        self.check(where, "slots", slots)
        turn = self.turn.copy()
        if turn.max() == _LAST_TURN:
            turn = np.unique(turn, return_inverse=True)[1].astype(np.int32)
        turn[slots] = turn.max() + 1
        return self._counted(slots, turn)

    def check(
        self,
        where: str,
        name: str,
        slots: np.ndarray,
        *,
        repeats: bool = False,
        idle: bool = False,
        generation: np.ndarray | None = None,
    ) -> None:
        """Check every entry of ``slots`` int [n], which the message calls ``name``.

        With ``idle`` a slot of -1 is passed over.

        Raises:
            SlotError: one is out of range, not in use, named twice (unless ``repeats``), or has
                another generation than the one given.
        """
        seen: dict[int, int] = {}
        for i, slot in enumerate(slots.tolist()):
            if idle and slot == IDLE:
                continue
            at = f"{where}: {name}[{i}] is {slot}"
            if not 0 <= slot < self.used.size:
                raise SlotError(f"{at}; needed 0 to {self.used.size - 1}")
            now = int(self.generation[slot])
            if now % 2 == 0:
                state = "was freed" if now else "was never handed out"
                raise SlotError(f"{at}, which {state}; needed slots in use")
            if not repeats and slot in seen:
                raise SlotError(f"{at}, as {name}[{seen[slot]}]; needed every slot once")
            if generation is not None and now != generation[i]:
                raise SlotError(f"{at} of generation {generation[i]}, freed since; it is at {now}")
            seen[slot] = i

    def checked(self, where: str, name: str, slots: Slots, *, repeats: bool = False) -> Any:
        """``slots`` as int32 [n], on the host after :meth:`check`; unchecked where traced."""
        if _traced(slots, self):
            return jnp.atleast_1d(jnp.asarray(slots, jnp.int32))
        ids = as_slots(where, name, slots)
        self.on_host(where).check(where, name, ids, repeats=repeats)
        return ids.astype(np.int32)

    def one(self, where: str, slot: Slots) -> Any:
        """One slot as int32 [1], as :meth:`checked`; SlotError for more or fewer."""
        ids = self.checked(where, "slot", slot)
        if ids.size != 1:
            raise SlotError(f"{where}: slot has shape {ids.shape}; needed one slot")
        return ids

    def check_rows(
        self, where: str, name: str, slots: Any, B: int, *, repeats: bool = False
    ) -> Array:
        """The slots of B rows, int32 [B]: each in use or -1; values are not checked if traced.

        Raises:
            ShapeError: a wrong shape or dtype.
            SlotError: a slot out of range, named twice (unless ``repeats``), or not in use.
        """
        check_array(where, name, slots, [("B", B)], [jnp.int32])
        if not _traced(slots, self):
            table = self.on_host(where)
            table.check(where, name, np.asarray(slots), repeats=repeats, idle=True)
        return jnp.asarray(slots)

    def _counted(self, slots: np.ndarray, turn: np.ndarray) -> Self:
        generation = self.generation.copy()
        generation[slots] += 1
        return type(self)(_frozen(generation), _frozen(turn))


def as_slots(where: str, name: str, slots: Any) -> np.ndarray:
    """One slot or several as a host array [n] of whole numbers.

    Raises:
        SlotError: not an int32 scalar or [n].
    """
    x = np.asarray(slots)
    x = x if x.size else x.astype(np.int32)
    if x.ndim > 1 or not np.issubdtype(x.dtype, np.integer):
        found = f"shape {x.shape} and dtype {x.dtype}"
        raise SlotError(f"{where}: {name} has {found}; needed int32 [n] or one slot")
    return np.atleast_1d(x)


def _traced(*values: Any) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(values))


def _frozen(x: np.ndarray) -> np.ndarray:
    x.setflags(write=False)
    return x
