"""Weights at 4.5 bits: 4-bit integers in groups of 32 columns with one float16 scale each."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax._core.checks import FLOATS, check_array
from gdn_jax.errors import ShapeError
from gdn_jax.types import Array

GROUP = 32
"""Columns that share a scale."""

WORDS = 4
"""int32 words of a group."""

SHIFTS = np.array([[0, 8, 16, 24], [4, 12, 20, 28]], np.int32)
"""``SHIFTS[h, b] = 4·h + 8·b``, the position in its word of the column ``16·h + 4·i + b``."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Q4Array:
    """A weight matrix [.., N, K] of 4-bit integers, K a multiple of 32; a pytree.

    ``packed`` is int32 [.., N, K/8] and ``scales`` float16 [.., N, K/32]. With the column
    ``k = 32·g + 16·h + 4·i + b`` (h in 0..1, i and b in 0..3)::

        value[n, k]   = integer[n, k] · scales[n, g]
        integer[n, k] = the two's complement nibble of packed[n, 4·g + i] at bit 4·h + 8·b

    so integers are in -8..7 and scales of either sign. In memory, the 16 bytes of a group's words
    hold column ``j`` in the low and ``j + 16`` in the high half of byte ``j``.

    Both fields have the same leading axes, so that ``jax.tree.map`` can index a stack, and
    ``vmap`` and ``scan`` can run over one.
    """

    packed: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [.., N, K] of the weights."""
        return (*self.packed.shape[:-1], GROUP // WORDS * self.packed.shape[-1])

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.packed.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of both fields: 4.5 bits a weight."""
        return sum(x.size * x.dtype.itemsize for x in (self.packed, self.scales))


def check_q4(
    where: str, name: str, w: Any, dims: Sequence[tuple[str, int | None]] | None = None
) -> None:
    """Raise ShapeError unless ``w`` is a whole Q4Array of these sizes (None: any two or more)."""
    if not isinstance(w, Q4Array):
        raise ShapeError(f"{where}: {name} is a {type(w).__name__}; needed a gdn_jax.Q4Array")
    lead = [("..", None)] * (np.ndim(w.scales) - 2) if dims is None else dims[:-2]
    check_array(
        where, f"{name}.scales", w.scales, [*lead, ("N", None), ("K/32", None)], [jnp.float16]
    )
    *rows, groups = w.scales.shape
    words = [*(("N", n) for n in rows), ("K/8", WORDS * groups)]
    check_array(where, f"{name}.packed", w.packed, words, [jnp.int32])
    if dims is not None and any(
        n not in (None, found) for (_, n), found in zip(dims, w.shape, strict=True)
    ):
        needed = ", ".join(n if size is None else f"{n}={size}" for n, size in dims)
        raise ShapeError(f"{where}: {name} is int4 of shape {w.shape}; needed [{needed}]")


def dequantize(w: Q4Array, dtype: Any = jnp.float32) -> Array:
    """``integer · scale``, [.., N, K]: what every other path is measured against.

    Exact in float32, since a product has at most 15 significant bits; in bfloat16 and float16 it
    is that number rounded once, and infinite beyond the range of float16.

    Args:
        w: the weights, with any leading axes.
        dtype: float32, bfloat16 or float16.

    Raises:
        ShapeError: ``w`` is not a Q4Array or its fields do not fit each other; another dtype.
    """
    check_q4("dequantize", "w", w)
    if jnp.dtype(dtype) not in [jnp.dtype(d) for d in FLOATS]:
        needed = ", ".join(jnp.dtype(d).name for d in FLOATS)
        raise ShapeError(f"dequantize: dtype is {jnp.dtype(dtype).name}; needed one of {needed}")
    return _dequantized(w, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _dequantized(w: Q4Array, dtype: Any) -> Array:
    values = unpack(w).astype(jnp.float32) * w.scales[..., None].astype(jnp.float32)
    return values.reshape(w.shape).astype(dtype)


def unpack(w: Q4Array) -> Array:
    """The integers by group, int32 [.., N, K/32, 32]."""
    words = jnp.expand_dims(w.packed.reshape(*w.scales.shape, WORDS), (-3, -1))
    left = lax.expand_dims(28 - SHIFTS[:, None, :], range(w.ndim))
    return jnp.right_shift(jnp.left_shift(words, left), 28).reshape(*w.scales.shape, GROUP)
