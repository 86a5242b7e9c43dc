"""A Gated DeltaNet layer in its block: on the kernels, on XLA, or on XLA for many tokens."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.layer.compose import forward, prefill_tokens
from gdn_jax.layer.pallas import KernelLayer
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState
from gdn_jax.models.residual import Stream, joined
from gdn_jax.models.route import Call
from gdn_jax.types import Array


def advance(
    params: GDNParams,
    states: GDNState,
    layer: int | Array,
    h: Array,
    residual: Array,
    lengths: Array | None,
    call: Call,
) -> tuple[GDNState, Stream]:
    """The states after these tokens, and ``residual + y``: h, residual [B, T, D].

    Args:
        params: of the layer.
        states: S [L, B, HV, K, V] and conv_hist of all linear layers.
        layer: the one of L that is read and written.
        h: float32, after the block's norm.
        residual: float32.
        lengths: int32 [B], as for :func:`gdn_jax.models.forward.forward`.
        call: static.
    """
    if h.shape[1] == 1 and call.route.backend == "pallas":
        slots = None
        if lengths is not None:
            slot = jnp.where(lengths > 0, jnp.arange(len(h), dtype=jnp.int32), -1)
            slots = slot, slot
        kernels = KernelLayer(params, call.cfg.gdn)
        slices, states, _ = kernels.step(states, layer, h[:, 0], slots=slots, summed=False)
        return states, joined(slices, residual)
    own = jax.tree.map(lambda s: s[layer], states)
    if h.shape[1] > 1:
        route = call.route
        y, new = prefill_tokens(
            params, own, h, call.cfg.gdn, lengths, precision=route.precision, backend=route.rule
        )
        return _replaced(states, layer, new), residual + y
    y, new, _ = forward(params, own, h[:, 0], call.cfg.gdn)
    if lengths is not None:
        new = jax.tree.map(functools.partial(_where_active, lengths), new, own)
    # Otherwise the next layer's part is taken from the old stack, which a loop then copies.
    return lax.optimization_barrier((_replaced(states, layer, new), residual + y[:, None]))


def _replaced(states: GDNState, layer: int | Array, new: GDNState) -> GDNState:
    return jax.tree.map(lambda s, n: s.at[layer].set(n), states, new)


def _where_active(lengths: Array, new: Array, old: Array) -> Array:
    return jnp.where(lengths.reshape(-1, *[1] * (new.ndim - 1)) > 0, new, old)
