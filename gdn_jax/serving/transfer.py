"""What the slots of a pool hold, taken out and put back in."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import check_array, check_finite
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError, SlotError
from gdn_jax.layer.state import GDNState
from gdn_jax.serving.device import padded, read_slot, write_slots
from gdn_jax.serving.prefix import Checkpoint
from gdn_jax.serving.table import Slots, SlotTable
from gdn_jax.types import Array


class SlotContents:
    """The part of :class:`gdn_jax.StatePool` that moves states across its border."""

    cfg: GDNConfig
    S: Array
    conv_hist: Array
    _table: Callable[[str], SlotTable]
    _checked: Callable[..., Any]
    _run: Callable[..., Self]

    @property
    def num_layers(self) -> int:
        """L."""
        return self.S.shape[0]

    @property
    def _state(self) -> GDNState:
        return GDNState(self.S, self.conv_hist)

    def export(self, slots: Slots) -> dict[str, np.ndarray]:
        """Host copies under their field names: S [L, n, HV, K, V], conv_hist [L, n, W-1, C].

        What :func:`gdn_jax.export_state` gives for a stack with a batch of n; one slot at a time
        is read.

        Raises:
            SlotError: a slot out of range or not in use; a slot may be named twice.
        """
        ids = self._checked("StatePool.export", "slots", slots, repeats=True)
        arrays = {}
        for name, x in vars(self._state).items():
            arrays[name] = np.empty((x.shape[0], ids.size, *x.shape[2:]), np.float32)
        for i, slot in enumerate(ids):
            for name, part in vars(read_slot(self._state, slot)).items():
                arrays[name][:, i] = part
        return arrays

    def import_(
        self, slots: Slots, arrays: Mapping[str, np.ndarray], *, donate: bool = False
    ) -> Self:
        """Overwrite slots in use with host arrays as :meth:`export` gives them.

        Raises:
            SlotError: a slot out of range, named twice, or not in use.
            ShapeError: an array missing, of the wrong shape or dtype, or not finite.
        """
        where = "StatePool.import_"
        ids = self._checked(where, "slots", slots)
        for name in ("S", "conv_hist"):
            if name not in arrays:
                found = ", ".join(sorted(arrays)) or "nothing"
                raise ShapeError(f"{where}: no {name}; found {found}; needed S and conv_hist")
            needed = pool_dims(self.cfg, ("L", self.num_layers), ("n", ids.size))[name]
            check_array(where, name, arrays[name], needed, [jnp.float32])
            check_finite(where, name, np.asarray(arrays[name]), ShapeError)
        pool = self
        for i in range(ids.size):
            part = GDNState(*(jnp.asarray(arrays[name][:, i]) for name in ("S", "conv_hist")))
            pool = pool._run(write_slots, donate or i > 0, ids[i : i + 1], part)
        return pool

    def checkpoint(self, slot: Slots) -> Checkpoint:
        """A copy of what one slot in use holds in every layer, which outlives the slot.

        Raises:
            SlotError: not one slot, or one not in use.
        """
        ids = self._one("StatePool.checkpoint", slot)
        return Checkpoint(self.cfg, **vars(read_slot(self._state, ids[0])))

    def branch(self, checkpoint: Checkpoint, n: int, *, donate: bool = False) -> tuple[Self, Array]:
        """Hand out ``n`` slots, int32 [n], that hold what the checkpoint holds.

        Raises:
            ShapeError: not a checkpoint, or one of another configuration or number of layers.
            SlotError: ``n`` is not a whole number from 0 up.
            PoolFullError: fewer than ``n`` slots are free.
        """
        where = "StatePool.branch"
        if not isinstance(checkpoint, Checkpoint):
            found = type(checkpoint).__name__
            raise ShapeError(f"{where}: checkpoint is a {found}; needed gdn_jax.Checkpoint")
        if checkpoint.cfg != self.cfg:
            raise ShapeError(f"{where}: checkpoint is of {checkpoint.cfg}; needed {self.cfg}")
        part = GDNState(checkpoint.S, checkpoint.conv_hist)
        for name, dims in pool_dims(self.cfg, ("L", self.num_layers)).items():
            check_array(where, f"checkpoint.{name}", getattr(part, name), dims, [jnp.float32])
        table, new = self._table(where).alloc(where, n)
        return self._run(write_slots, donate, padded(new), part, table=table), jnp.asarray(new)

    def _one(self, where: str, slot: Slots) -> Any:
        ids = self._checked(where, "slot", slot)
        if ids.size != 1:
            raise SlotError(f"{where}: slot has shape {ids.shape}; needed one slot")
        return ids


def pool_dims(
    cfg: GDNConfig, *lead: tuple[str, int | None]
) -> dict[str, list[tuple[str, int | None]]]:
    """Names and sizes of the axes of S and conv_hist, behind those of ``lead``."""
    S = (("HV", cfg.num_v_heads), ("K", cfg.head_k_dim), ("V", cfg.head_v_dim))
    hist = (("W-1", cfg.conv_width - 1), ("C", cfg.conv_dim))
    return {"S": [*lead, *S], "conv_hist": [*lead, *hist]}
