"""Where a kernel reads and writes the states of a batch: a layer of a stack, and slots of rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl


class Place(NamedTuple):
    """One layer of a stack, and the slot of every row; row b is in slot b where none are given.

    ``layer`` is int32 [1]; ``read`` and ``write`` int32 [B] are both given or both None. A row
    whose slot is negative is idle: it reads and writes no state. A slot is written by one row.
    """

    layer: jax.Array
    read: jax.Array | None = None
    write: jax.Array | None = None

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        """The arrays that a kernel takes."""
        return tuple(x for x in self if x is not None)


class Row(NamedTuple):
    """A row's layer and slots inside a kernel, from the references to ``Place.operands``."""

    layer: Any
    source: Any
    target: Any
    always: bool

    @classmethod
    def of(cls, refs: tuple[Any, ...], row: Any) -> "Row":
        """Read the scalars of ``row``."""
        layer, *slots = refs
        source, target = (slot[row] for slot in slots) if slots else (row, row)
        return cls(layer[0], source, target, not slots)

    def when_active(self, run: Callable[[], None]) -> None:
        """``run()`` unless the row is idle."""
        run() if self.always else pl.when(self.source >= 0)(run)

    def when_idle(self, run: Callable[[], None]) -> None:
        """``run()`` if the row is idle."""
        if not self.always:
            pl.when(self.source < 0)(run)


def settled(*updated: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays that a kernel updated in place, safe to be stacked by a loop.

    XLA lets a kernel write straight into the slice of a stack that keeps its result, even where
    that result is an operand updated in place: then the stack and the state are never written.
    """
    return lax.optimization_barrier(updated)
