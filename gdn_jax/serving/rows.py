"""Tokens for rows whose states lie in slots of a pool; idle rows neither read nor write."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax._core.checks import check_array
from gdn_jax._core.varying import varying_like
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError
from gdn_jax.layer.compose import forward, kernel_step
from gdn_jax.layer.pallas import KernelLayer
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState
from gdn_jax.serving.drafts import DraftRecord, Plan, committed, draft, within
from gdn_jax.serving.table import SlotTable
from gdn_jax.types import Array


def step_rows(
    params: GDNParams,
    states: GDNState,
    layer: int | Array,
    x: Array,
    slots: tuple[Array, Array],
    cfg: GDNConfig,
    backend: str,
) -> tuple[Array, GDNState]:
    """One token: row b reads slot ``slots[0][b]`` and writes ``slots[1][b]``; -1 in either is idle.

    On pallas the kernels index the pool; on xla the rows' states are copied out and back in.
    """
    idle = (slots[0] < 0) | (slots[1] < 0)
    read, write = (jnp.where(idle, -1, x) for x in slots)
    if backend == "pallas":
        y, states, _ = KernelLayer(params, cfg).step(states, layer, x, slots=(read, write))
        return blank_idle(y, read), states
    y, rows, _ = forward(params, read_rows(states, layer, read), x, cfg)
    return blank_idle(y, read), write_rows(states, layer, write, rows)


def draft_rows(
    params: GDNParams,
    states: GDNState,
    layer: int | Array,
    xs: Array,
    slots: Array,
    plan: Plan,
    cfg: GDNConfig,
    backend: str,
) -> tuple[Array, DraftRecord]:
    """:func:`gdn_jax.serving.drafts.draft` from the slots of the rows; an idle row has no token."""
    kernels = KernelLayer(params, cfg) if backend == "pallas" else None

    def step(rows: GDNState, x: Array):
        if kernels is None:
            return forward(params, rows, x, cfg)
        return kernel_step(kernels, rows, x, trace=True)

    rows = varying_like(read_rows(states, layer, slots), params, xs, plan)
    plan = dataclasses.replace(plan, lengths=jnp.where(slots >= 0, plan.lengths, 0))
    return draft(step, rows, xs, plan, cfg, backend)


def commit_rows(
    states: GDNState, records: Mapping[int, DraftRecord], slots: Array, accepted: Array
) -> GDNState:
    """The pool's states, each row's slot advanced to its accepted node; idle rows change none."""
    for layer, record in records.items():
        rows = committed(record, read_rows(states, layer, slots), accepted)
        states = write_rows(states, layer, jnp.where(accepted > 0, slots, -1), rows)
    return states


def check_commit(
    where: str,
    table: SlotTable,
    num_layers: int,
    records: Mapping[int, DraftRecord],
    slots: Any,
    accepted: Any,
) -> tuple[Array, Array]:
    """Slots and accepted numbers, int32 [B]; values are checked unless traced.

    Raises:
        ShapeError: no such layer, or an argument of the wrong shape or dtype.
        SlotError: as :meth:`SlotTable.check_rows`.
    """
    for layer in records:
        if type(layer) is not int or not 0 <= layer < num_layers:
            needed = f"needed 0 to {num_layers - 1}"
            raise ShapeError(f"{where}: records has layer {layer!r}; {needed}")
    for B, Td in {record.parents.shape for record in records.values()}:
        table.check_rows(where, "slots", slots, B)
        check_array(where, "accepted", accepted, [("B", B)], [jnp.int32])
        if not isinstance(accepted, Tracer) and not within(accepted, 0, Td):
            raise ShapeError(f"{where}: accepted is {np.asarray(accepted)}; needed 0 to {Td}")
    return jnp.asarray(slots), jnp.asarray(accepted)


def read_rows(states: GDNState, layer: int | Array, slots: Array) -> GDNState:
    """The states of the rows, [B, ..]: from slot ``slots[b]`` of a layer of [L, N, ..].

    An idle row (-1) gets zeros.
    """

    def rows(x: Array) -> Array:
        taken = x[layer, jnp.maximum(slots, 0)]
        return jnp.where(_wide(slots >= 0, taken), taken, 0)

    return jax.tree.map(rows, states)


def write_rows(states: GDNState, layer: int | Array, slots: Array, rows: GDNState) -> GDNState:
    """The pool's states with row b in slot ``slots[b]`` of a layer; idle rows (-1) in none."""

    def write(x: Array, new: Array) -> Array:
        nowhere = x.shape[1]
        return x.at[layer, jnp.where(slots >= 0, slots, nowhere)].set(new, mode="drop")

    return jax.tree.map(write, states, rows)


def blank_idle(y: Array, slots: Array) -> Array:
    """``y`` with zeros in idle rows."""
    return jnp.where(_wide(slots >= 0, y), y, 0)


def _wide(mask: Array, like: Array) -> Array:
    return mask.reshape(-1, *[1] * (like.ndim - 1))
