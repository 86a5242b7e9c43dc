"""A bank's steps and drafts for sequences that are in slots of a pool."""

import dataclasses

import jax
import numpy as np

from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError
from gdn_jax.layer.compose import checked_backend
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState, zeros
from gdn_jax.serving.drafts import DraftRecord, check_draft
from gdn_jax.serving.pool import StatePool, check_pool
from gdn_jax.serving.resident import Slot
from gdn_jax.serving.rows import check_rows, draft_rows, step_rows
from gdn_jax.types import Array, Token, Tokens


class SlotSteps:
    """What :class:`gdn_jax.LayerBank` does with a :class:`gdn_jax.StatePool`."""

    cfg: GDNConfig
    num_layers: int
    slots: tuple[Slot, ...]

    def step_slots(
        self,
        pool: StatePool,
        layer: int,
        x: Token,
        slots: Array,
        *,
        write_slots: Array | None = None,
        backend: str | None = None,
    ) -> tuple[Token, StatePool]:
        """One token of one layer for B sequences of a pool: row b is in slot ``slots[b]``.

        A row of slot -1, to read or to write, is idle: it reads and writes nothing and its output
        is zero. What the others give does not depend on it. Traceable; jit it with the pool donated
        for an update in place. A row's bits depend on B and the backend, not on what the other rows
        hold; a batch of its own gives it within 1e-6.

        Args:
            pool: of this bank's configuration and number of layers.
            layer: of the stack.
            x: [B, D] float32.
            slots: int32 [B], the slots whose states are read.
            write_slots: int32 [B], where the new states go; ``slots`` by default. A prefix is read
                without being changed by writing elsewhere. No slot may be written twice.
            backend: as for :func:`gdn_jax.decode_step`.

        Raises:
            LayerNotResidentError: as :meth:`step`.
            ShapeError: an argument of the wrong shape, rank or dtype, or another pool.
            SlotError: a slot that is out of range, written twice or not in use, unless traced.
        """
        params, rows, chosen = self.ready_to_step(pool, layer, x, slots, write_slots, backend)
        states = GDNState(pool.S, pool.conv_hist)
        y, states = step_rows(params, states, layer, x, rows, self.cfg, chosen)
        return y, dataclasses.replace(pool, **vars(states))

    def ready_to_step(
        self,
        pool: StatePool,
        layer: int,
        x: Token,
        slots: Array,
        write_slots: Array | None,
        backend: str | None,
    ) -> tuple[GDNParams, tuple[Array, Array], str]:
        """Weights, slots read and written, and backend, after the checks of :meth:`step_slots`."""
        where = "LayerBank.step_slots"
        params, B = self._ready_pool(where, pool, layer, x)
        write = slots if write_slots is None else write_slots
        read = check_rows(where, "slots", slots, B, pool, repeats=write_slots is not None)
        write = check_rows(where, "write_slots", write, B, pool)
        chosen = checked_backend("decode_step", params, _rows(self.cfg, B), x, self.cfg, backend)
        return params, (read, write), chosen

    def draft_slots(
        self,
        pool: StatePool,
        layer: int,
        xs: Tokens,
        slots: Array,
        *,
        lengths: Array | None = None,
        parents: Array | None = None,
        scheme: str = "snapshot",
        backend: str | None = None,
    ) -> tuple[Tokens, DraftRecord]:
        """Up to Td draft tokens a row, xs [B, Td, D], from the slots of a pool that is not changed.

        ``pool.commit({layer: record}, slots, accepted)`` moves the slots on to what was accepted,
        exactly as decoding those tokens one by one would have: bit for bit on one backend.

        Args:
            pool, layer, slots, backend: as for :meth:`step_slots`; a slot may be read twice.
            xs: inputs; tokens beyond a row's length give zeros and cannot be accepted.
            lengths: int32 [B], 0 to Td; all by default.
            parents: int32 [B, Td] for a tree: the token that token t continues, before it in
                order, or -1 for the slot's own state; a chain by default.
            scheme: "snapshot" or "replay", see :mod:`gdn_jax.serving.drafts`.

        Returns:
            ys [B, Td, D], and what a commit needs.

        Raises:
            LayerNotResidentError, ShapeError, SlotError: as :meth:`step_slots`.
            UnknownNameError: no such scheme.
        """
        where = "LayerBank.draft_slots"
        params, B = self._ready_pool(where, pool, layer, xs)
        rows = check_rows(where, "slots", slots, B, pool, repeats=True)
        Td = xs.shape[1] if np.ndim(xs) == 3 else 1
        lengths, parents, chain = check_draft(where, B, Td, lengths, parents, scheme)
        state = _rows(self.cfg, B)
        chosen = checked_backend("decode", params, state, xs, self.cfg, backend, many=True)
        return draft_rows(
            params,
            GDNState(pool.S, pool.conv_hist),
            layer,
            xs,
            rows,
            self.cfg,
            chosen,
            lengths=lengths,
            parents=parents,
            chain=chain,
            scheme=scheme,
        )

    def _ready_pool(
        self, where: str, pool: StatePool, layer: int, x: Array
    ) -> tuple[GDNParams, int]:
        self._check_layer(where, layer)
        params = self.slots[layer].params(where, layer)
        check_pool(where, pool, self.num_layers)
        if pool.cfg != self.cfg:
            raise ShapeError(f"{where}: pool is of {pool.cfg}; needed {self.cfg}")
        if np.ndim(x) < 2:
            raise ShapeError(f"{where}: x has shape {np.shape(x)}; needed a batch of tokens")
        return params, x.shape[0]

    def _check_layer(self, where: str, layer: int) -> None:
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            raise ShapeError(f"{where}: layer is {layer!r}; needed 0 to {self.num_layers - 1}")


def _rows(cfg: GDNConfig, B: int) -> GDNState:
    """The shapes of the states of B rows."""
    return jax.eval_shape(lambda: zeros("LayerBank", cfg, (B,)))
