"""The states of many sequences in slots of two device arrays, and who owns which slot."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import check_array, check_config
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError, SlotError
from gdn_jax.layer.state import GDNState, zeros
from gdn_jax.serving import transfer
from gdn_jax.serving.device import JITTED, copy_slots, padded, read_slot, reset_slots, write_slots
from gdn_jax.serving.drafts import DraftRecord
from gdn_jax.serving.prefix import PrefixState
from gdn_jax.serving.rows import check_commit, commit_rows
from gdn_jax.serving.table import Slots, SlotTable, as_slots
from gdn_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StatePool:
    """``S`` float32 [L, N, HV, K, V] and ``conv_hist`` float32 [L, N, W-1, C] for N sequences.

    An immutable pytree: every method returns a new pool, and one that raises leaves the old pool
    exactly as it was. A slot is a plain int32 number that means the same in every layer.

    **What is checked.** ``alloc``, ``free`` and every method that takes slots check them on the
    host before anything runs on the device. A slot that is out of range, named twice, never handed
    out or freed is a SlotError. So double free and use after free raise for as long as the slot is
    free, and a freed slot is handed out again only after all other free slots. Once it is handed
    out again, its number belongs to the new owner; a caller who must tell the two owners apart
    keeps :meth:`generation` and passes it to :meth:`check`.

    **Memory.** Nothing is donated unless asked: by default a method leaves this pool usable and so
    copies both arrays, however little it changes. With ``donate=True`` the arrays are updated in
    place and only the slots named are touched; this pool, and every pool that shares its arrays,
    can then no longer be used. ``free`` touches no array, and shares them with the new pool.

    **Under jit.** A pool goes in and comes out like any pytree; donate it there for an update in
    place. The table travels as two small int32 leaves, not as static data: a step is traced once,
    whichever slots are handed out later, and the pool that it returns has the table of the call.
    That table is then on the device, so the next method that reads it waits for the step. Inside
    jit, slots cannot be handed out, freed or checked; ``reset`` and ``copy`` work unchecked, and a
    slot outside 0..N-1, such as the -1 of an idle row, neither reads nor writes.
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
    def num_layers(self) -> int:
        """L."""
        return self.S.shape[0]

    @property
    def states(self) -> GDNState:
        """Both arrays."""
        return GDNState(self.S, self.conv_hist)

    @property
    def num_slots(self) -> int:
        """N."""
        return self.S.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays, those of free slots included."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in (self.S, self.conv_hist))

    @property
    def occupancy(self) -> int:
        """How many slots are in use."""
        return self.used.size

    @property
    def used(self) -> np.ndarray:
        """The slots in use, int32, ascending."""
        return np.flatnonzero(self.table.on_host("StatePool.used").used).astype(np.int32)

    def generation(self, slots: Slots) -> np.ndarray:
        """Int32 [n]: numbers that differ between two owners of one slot; see :meth:`check`."""
        where = "StatePool.generation"
        return self.table.on_host(where).generation[self.table.checked(where, "slots", slots)]

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
        self.table.on_host(where).check(where, "slots", ids, generation=generation)

    def alloc(self, n: int, *, donate: bool = False) -> tuple[Self, Array]:
        """Hand out ``n`` slots, int32 [n], zeroed in every layer whatever they held.

        Raises:
            SlotError: ``n`` is not a whole number from 0 up.
            PoolFullError: fewer than ``n`` slots are free.
        """
        where = "StatePool.alloc"
        table, slots = self.table.on_host(where).alloc(where, n)
        return self._run(reset_slots, donate, padded(slots), table=table), jnp.asarray(slots)

    def free(self, slots: Slots) -> Self:
        """Take slots back. No array is touched: a slot is zeroed when it is handed out.

        Raises:
            SlotError: a slot out of range, named twice, or not in use (double free).
        """
        where = "StatePool.free"
        table = self.table.on_host(where).free(where, as_slots(where, "slots", slots))
        return dataclasses.replace(self, table=table)

    def reset(self, slots: Slots, *, donate: bool = False) -> Self:
        """Zero slots in use, whatever they held, NaN included.

        Raises:
            SlotError: a slot out of range, named twice, or not in use.
        """
        ids = self.table.checked("StatePool.reset", "slots", slots)
        return self._run(reset_slots, donate, padded(ids))

    def fork(self, slot: Slots, n: int, *, donate: bool = False) -> tuple[Self, Array]:
        """Hand out ``n`` slots, int32 [n], that hold what ``slot`` holds: branches of one prefix.

        Raises:
            SlotError: not one slot, or one not in use; ``n`` is not a whole number from 0 up.
            PoolFullError: fewer than ``n`` slots are free.
        """
        where = "StatePool.fork"
        src = self.table.one(where, slot)
        table, new = self.table.on_host(where).alloc(where, n)
        return self._run(copy_slots, donate, src, padded(new), table=table), jnp.asarray(new)

    def copy(self, src: Slots, dst: Slots, *, donate: bool = False) -> Self:
        """``dst[i]`` takes what ``src[i]`` held before the call; one ``src`` serves every ``dst``.

        Raises:
            SlotError: a slot out of range or not in use, a ``dst`` named twice, or another number
                of slots in ``src`` than in ``dst``.
        """
        where = "StatePool.copy"
        source = self.table.checked(where, "src", src, repeats=True)
        target = self.table.checked(where, "dst", dst)
        if source.size not in (1, target.size):
            needed = f"one slot or {target.shape}, as dst"
            raise SlotError(f"{where}: src has shape {source.shape}; needed {needed}")
        source = source if source.size == 1 else padded(source)
        return self._run(copy_slots, donate, source, padded(target))

    def commit(self, records: Mapping[int, DraftRecord], slots: Array, accepted: Array) -> Self:
        """Advance every row's slot by its accepted draft tokens, in the layers that have a record.

        The slot then holds what decoding the tokens on the path one by one would have left, bit
        for bit on one backend; rejected tokens leave no trace. Works under jit, where the pool may
        be donated; elsewhere both arrays are copied.

        Args:
            records: by layer, what :meth:`gdn_jax.LayerBank.draft_slots` gave for these slots.
            slots: int32 [B]; -1 is an idle row.
            accepted: int32 [B]: how many tokens of a chain, 0 to the row's length; for a tree the
                accepted node's index + 1.

        Raises:
            ShapeError: no such layer, or an argument of the wrong shape or dtype.
            SlotError: a slot that is out of range, named twice or not in use, unless traced.
        """
        rows, accepted = check_commit(
            "StatePool.commit", self.table, self.num_layers, records, slots, accepted
        )
        states = commit_rows(self.states, records, rows, accepted)
        return dataclasses.replace(self, **vars(states))

    def export(self, slots: Slots) -> dict[str, np.ndarray]:
        """Host copies under their field names: S [L, n, HV, K, V], conv_hist [L, n, W-1, C].

        As :func:`gdn_jax.export_state` gives them for a stack with a batch of n.

        Raises:
            SlotError: a slot out of range or not in use; a slot may be named twice.
        """
        ids = self.table.checked("StatePool.export", "slots", slots, repeats=True)
        return transfer.read_out(self.states, ids)

    def import_(
        self, slots: Slots, arrays: Mapping[str, np.ndarray], *, donate: bool = False
    ) -> Self:
        """Overwrite slots in use with host arrays as :meth:`export` gives them.

        Raises:
            SlotError: a slot out of range, named twice, or not in use.
            ShapeError: an array missing, of the wrong shape or dtype, or not finite.
        """
        where = "StatePool.import_"
        ids = self.table.checked(where, "slots", slots)
        transfer.check_host(where, arrays, self.cfg, self.num_layers, ids.size)
        pool = self
        for i, part in enumerate(transfer.parts(arrays)):
            pool = pool._run(write_slots, donate or i > 0, ids[i : i + 1], part)
        return pool

    def checkpoint(self, slot: Slots) -> PrefixState:
        """A copy of what one slot in use holds in every layer, which outlives the slot.

        Raises:
            SlotError: not one slot, or one not in use.
        """
        ids = self.table.one("StatePool.checkpoint", slot)
        return PrefixState(self.cfg, **vars(read_slot(self.states, ids[0])))

    def branch(
        self, checkpoint: PrefixState, n: int, *, donate: bool = False
    ) -> tuple[Self, Array]:
        """Hand out ``n`` slots, int32 [n], that hold what ``checkpoint`` holds.

        Raises:
            ShapeError: not a PrefixState, or one of another configuration or number of layers.
            SlotError: ``n`` is not a whole number from 0 up.
            PoolFullError: fewer than ``n`` slots are free.
        """
        where = "StatePool.branch"
        transfer.check_prefix(where, checkpoint, self.cfg, self.num_layers)
        table, new = self.table.on_host(where).alloc(where, n)
        part = GDNState(checkpoint.S, checkpoint.conv_hist)
        return self._run(write_slots, donate, padded(new), part, table=table), jnp.asarray(new)

    def _run(
        self,
        op: Callable[..., GDNState],
        donate: bool,
        *operands: Any,
        table: SlotTable | None = None,
    ) -> Self:
        state = JITTED[op, donate](self.states, *operands)
        return dataclasses.replace(self, **vars(state), table=table or self.table)


def check_pool(
    where: str, pool: Any, cfg: GDNConfig | None = None, num_layers: int | None = None
) -> None:
    """Raise ShapeError unless ``pool`` is a StatePool whose arrays fit its configuration.

    ``cfg`` and ``num_layers``, where given, are those that it must have.
    """
    if not isinstance(pool, StatePool):
        raise ShapeError(f"{where}: pool is a {type(pool).__name__}; needed gdn_jax.StatePool")
    check_config(where, pool.cfg)
    needed = transfer.state_dims(pool.cfg, ("L", num_layers), ("N", None))
    check_array(where, "pool.S", pool.S, needed["S"], [jnp.float32])
    L, N = zip("LN", pool.S.shape[:2], strict=True)
    needed = transfer.state_dims(pool.cfg, L, N)
    check_array(where, "pool.conv_hist", pool.conv_hist, needed["conv_hist"], [jnp.float32])
    for name, x in vars(pool.table).items():
        check_array(where, f"pool.table.{name}", x, [N], [jnp.int32])
    if cfg is not None and pool.cfg != cfg:
        raise ShapeError(f"{where}: pool is of {pool.cfg}; needed {cfg}")
