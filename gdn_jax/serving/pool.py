"""The states of many sequences in slots of two device arrays, and who owns which slot."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax._core.checks import check_array, check_config
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError, SlotError
from gdn_jax.layer.state import GDNState, zeros
from gdn_jax.serving.device import JITTED, copy_slots, padded, reset_slots
from gdn_jax.serving.drafts import DraftRecord
from gdn_jax.serving.rows import check_commit, commit_rows
from gdn_jax.serving.table import Slots, SlotTable, as_slots
from gdn_jax.serving.transfer import SlotContents, pool_dims
from gdn_jax.types import Array

jax.tree_util.register_dataclass(SlotTable, ["generation", "turn"], [])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StatePool(SlotContents):
    """``S`` float32 [L, N, HV, K, V] and ``conv_hist`` float32 [L, N, W-1, C] for N sequences.

    An immutable pytree: every method returns a new pool, and one that raises leaves the old pool
    exactly as it was. A slot is a plain int32 number that means the same in every layer.

    **What is found.** ``alloc``, ``free`` and every method that takes slots check them on the host
    before anything runs on the device. A slot that is out of range, named twice, never handed out
    or freed is a SlotError: double free and use after free are found for as long as the slot is
    free, and a freed slot is handed out again only after all others that are free. Once it is
    handed out again its old number is the new owner's number; whoever must know the difference
    keeps :meth:`generation` and asks :meth:`check`.

    **Memory.** Nothing is donated unless asked: by default a method leaves this pool usable and so
    copies both arrays, whatever it changes in them. With ``donate=True`` the arrays are updated in
    place and only the slots named are touched; this pool, and every pool that shares its arrays,
    can then no longer be used. ``free`` touches no array, and shares them with the new pool.

    **Under jit.** A pool goes in and comes out like any pytree; donate it there for an update in
    place. The table travels as two small int32 leaves, not as static data: a step is traced once
    whatever is handed out meanwhile, and the pool that it returns has the table of the call. That
    table is then on the device, so the next method to look at it waits for the step. Slots cannot
    be handed out, freed or checked inside; ``reset`` and ``copy`` work there unchecked, and a slot
    outside 0..N-1, such as the -1 of an idle row, neither reads nor writes.
    """

    cfg: GDNConfig = dataclasses.field(metadata={"static": True})
    S: Array = dataclasses.field(repr=False)
    conv_hist: Array = dataclasses.field(repr=False)
    table: SlotTable = dataclasses.field(repr=False)

    @classmethod
    def create(cls, cfg: GDNConfig, num_layers: int, num_slots: int) -> Self:
        """Zeros, with every slot free.

        Raises:
            ShapeError: ``cfg`` is not a GDNConfig, or a number is not a positive integer.
        """
        where = "StatePool.create"
        check_config(where, cfg)
        for name, size in (("num_layers", num_layers), ("num_slots", num_slots)):
            if type(size) is not int or size < 1:
                raise ShapeError(f"{where}: {name} is {size!r}; needed a positive integer")
        state = zeros(where, cfg, (num_layers, num_slots))
        return cls(cfg, state.S, state.conv_hist, SlotTable.create(num_slots))

    @property
    def num_slots(self) -> int:
        """N."""
        return self.S.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays, used or not."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in (self.S, self.conv_hist))

    @property
    def occupancy(self) -> int:
        """How many slots are in use."""
        return self.used.size

    @property
    def used(self) -> np.ndarray:
        """The slots in use, int32, ascending."""
        return np.flatnonzero(self._table("StatePool.used").used).astype(np.int32)

    def generation(self, slots: Slots) -> np.ndarray:
        """Int32 [n]: numbers that differ between two owners of one slot; see :meth:`check`."""
        where = "StatePool.generation"
        return self._table(where).generation[self._checked(where, "slots", slots)]

    def check(self, slots: Slots, *, generation: np.ndarray | None = None) -> None:
        """Do nothing if every slot is in use and, where given, still of that ``generation`` [n].

        Raises:
            SlotError: a slot out of range, named twice, not in use, or handed out again since.
        """
        where = "StatePool.check"
        ids = as_slots(where, "slots", slots)
        if generation is not None:
            generation = as_slots(where, "generation", generation)
            if generation.shape != ids.shape:
                found = f"generation has shape {generation.shape}"
                raise SlotError(f"{where}: {found}; needed {ids.shape}, as slots")
        self._table(where).check(where, "slots", ids, generation=generation)

    def alloc(self, n: int, *, donate: bool = False) -> tuple[Self, Array]:
        """Hand out ``n`` slots, int32 [n], zeroed in every layer whatever they held.

        Raises:
            SlotError: ``n`` is not a whole number from 0 up.
            PoolFullError: fewer than ``n`` slots are free.
        """
        where = "StatePool.alloc"
        table, slots = self._table(where).alloc(where, n)
        return self._run(reset_slots, donate, padded(slots), table=table), jnp.asarray(slots)

    def free(self, slots: Slots) -> Self:
        """Take slots back. No array is touched: a slot is zeroed when it is handed out.

        Raises:
            SlotError: a slot out of range, named twice, or not in use (double free).
        """
        where = "StatePool.free"
        table = self._table(where).free(where, as_slots(where, "slots", slots))
        return dataclasses.replace(self, table=table)

    def reset(self, slots: Slots, *, donate: bool = False) -> Self:
        """Zero slots in use, whatever they held, NaN included.

        Raises:
            SlotError: a slot out of range, named twice, or not in use.
        """
        ids = self._checked("StatePool.reset", "slots", slots)
        return self._run(reset_slots, donate, padded(ids))

    def fork(self, slot: Slots, n: int, *, donate: bool = False) -> tuple[Self, Array]:
        """Hand out ``n`` slots, int32 [n], that hold what ``slot`` holds: branches of one prefix.

        Raises:
            SlotError: not one slot, or one not in use; ``n`` is not a whole number from 0 up.
            PoolFullError: fewer than ``n`` slots are free.
        """
        where = "StatePool.fork"
        src = self._one(where, slot)
        table, new = self._table(where).alloc(where, n)
        return self._run(copy_slots, donate, src, padded(new), table=table), jnp.asarray(new)

    def copy(self, src: Slots, dst: Slots, *, donate: bool = False) -> Self:
        """``dst[i]`` takes what ``src[i]`` held before the call; one ``src`` serves every ``dst``.

        Raises:
            SlotError: a slot out of range or not in use, a ``dst`` named twice, or another number
                of slots in ``src`` than in ``dst``.
        """
        where = "StatePool.copy"
        source = self._checked(where, "src", src, repeats=True)
        target = self._checked(where, "dst", dst)
        if source.size not in (1, target.size):
            needed = f"one slot or {target.shape}, as dst"
            raise SlotError(f"{where}: src has shape {source.shape}; needed {needed}")
        source = source if source.size == 1 else padded(source)
        return self._run(copy_slots, donate, source, padded(target))

    def commit(self, records: Mapping[int, DraftRecord], slots: Array, accepted: Array) -> Self:
        """Move every row's slot on to its accepted draft tokens, in the layers that have a record.

        The slot then holds what decoding the tokens on the path one by one would have left, bit
        for bit on one backend; rejected tokens leave no trace. Works under jit, where the pool may
        be donated; elsewhere both arrays are copied.

        Args:
            records: of :meth:`gdn_jax.LayerBank.draft_slots` from these slots, by layer.
            slots: int32 [B]; -1 is an idle row.
            accepted: int32 [B]: how many tokens of a chain, 0 to the row's length; for a tree the
                accepted node's index + 1.

        Raises:
            ShapeError: no such layer, or an argument of the wrong shape or dtype.
            SlotError: a slot that is out of range, named twice or not in use, unless traced.
        """
        rows, accepted = check_commit("StatePool.commit", self, records, slots, accepted)
        states = commit_rows(self._state, records, rows, accepted)
        return dataclasses.replace(self, **vars(states))

    def _table(self, where: str) -> SlotTable:
        """The table on the host."""
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(self.table)):
            raise SlotError(f"{where}: the pool is traced; needed a call outside jit")
        return jax.tree.map(np.asarray, self.table)

    def _checked(self, where: str, name: str, slots: Slots, *, repeats: bool = False) -> Any:
        """``slots`` as int32 [n], checked unless traced."""
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((slots, self.table))):
            return jnp.atleast_1d(jnp.asarray(slots, jnp.int32))
        ids = as_slots(where, name, slots)
        self._table(where).check(where, name, ids, repeats=repeats)
        return ids.astype(np.int32)

    def _run(
        self,
        op: Callable[..., GDNState],
        donate: bool,
        *operands: Any,
        table: SlotTable | None = None,
    ) -> Self:
        state = JITTED[op, donate](self._state, *operands)
        return dataclasses.replace(self, **vars(state), table=table or self.table)


def check_pool(where: str, pool: Any, layers: int | None = None) -> None:
    """Raise ShapeError unless ``pool`` is a StatePool whose arrays fit its configuration."""
    if not isinstance(pool, StatePool):
        raise ShapeError(f"{where}: pool is a {type(pool).__name__}; needed gdn_jax.StatePool")
    check_config(where, pool.cfg)
    dims = pool_dims(pool.cfg, ("L", layers), ("N", None))
    check_array(where, "pool.S", pool.S, dims["S"], [jnp.float32])
    dims = pool_dims(pool.cfg, ("L", pool.num_layers), ("N", pool.num_slots))
    check_array(where, "pool.conv_hist", pool.conv_hist, dims["conv_hist"], [jnp.float32])
    for name, x in vars(pool.table).items():
        check_array(where, f"pool.table.{name}", x, [("N", pool.num_slots)], [jnp.int32])
