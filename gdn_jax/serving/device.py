"""What a pool does on the device: whole slots zeroed, copied, read and written by index.

Each operation is one program over S and conv_hist [L, N, ..] that touches only the given slots. An
index outside 0..N-1, such as -1, neither reads nor writes; only :func:`read_slot` needs one inside.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.layer.state import GDNState
from gdn_jax.types import Array


def padded(slots: Any) -> Any:
    """Host slots padded to a power of two with -1, which the device skips: few sizes compile."""
    if isinstance(slots, np.ndarray):
        padding = (1 << (slots.size - 1).bit_length() if slots.size else 1) - slots.size
        return np.pad(slots, (0, padding), constant_values=-1)
    return slots


def _put(x: Array, slots: Array, values: Any) -> Array:
    return x.at[:, slots].set(values, mode="drop", wrap_negative_indices=False)


def reset_slots(state: GDNState, slots: Array) -> GDNState:
    """Zeros in ``slots`` [n]."""
    return jax.tree.map(lambda x: _put(x, slots, 0.0), state)


def copy_slots(state: GDNState, src: Array, dst: Array) -> GDNState:
    """``src`` [n] or [1] into ``dst`` [n]; every source is read before any target is written."""
    dst = jnp.where((src >= 0) & (src < state.S.shape[1]), dst, -1)
    return jax.tree.map(lambda x: _put(x, dst, jnp.take(x, src, axis=1, mode="clip")), state)


def _read(state: GDNState, slot: Array) -> GDNState:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 1, keepdims=False), state)


def write_slots(state: GDNState, slots: Array, part: GDNState) -> GDNState:
    """``part`` [L, ..] into every one of ``slots`` [n]."""
    return jax.tree.map(lambda x, new: _put(x, slots, jnp.expand_dims(new, 1)), state, part)


read_slot = jax.jit(_read)
JITTED = {
    (op, donate): jax.jit(op, donate_argnums=(0,) if donate else ())
    for op in (reset_slots, copy_slots, write_slots)
    for donate in (False, True)
}
"""Each operation compiled, and compiled with the pool's arrays donated."""
