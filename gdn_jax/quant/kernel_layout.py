"""int4 weights laid out once for the GPU kernel, beside the exchange form."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching

from gdn_jax._core.backend import Matrix
from gdn_jax._core.checks import check_array
from gdn_jax.errors import ShapeError
from gdn_jax.quant.q4array import Q4Array, check_q4
from gdn_jax.types import Array
from pallas_kernels import q4_layout
from pallas_kernels.kernels import q4_gemv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Q4Kernel:
    """A Q4Array's bits in the order that the GPU kernel reads, N and K multiples of 64; a pytree.

    ``blocks`` is int32 [.., N/64, K/64, 9, 64], as :mod:`pallas_kernels.q4_layout` states it.
    To join matrices of equal K by rows, join their ``blocks`` along the axis N/64.
    """

    blocks: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [.., N, K] of the weights."""
        *lead, rows, columns, _, _ = self.blocks.shape
        return (*lead, rows * q4_layout.TILE, columns * q4_layout.TILE)

    @property
    def ndim(self) -> int:
        """The number of axes of the weights."""
        return self.blocks.ndim - 2

    @property
    def nbytes(self) -> int:
        """4.5 bits a weight, as in a Q4Array."""
        return self.blocks.size * self.blocks.dtype.itemsize


def to_kernel(w: Q4Array) -> Q4Kernel:
    """The kernel's form of ``w``, with any leading axes; :func:`from_kernel` gives its bits back.

    Raises:
        ShapeError: not a Q4Array, or N or K is not a multiple of 64.
    """
    check_q4("to_kernel", "w", w)
    reason = q4_layout.unavailable_reason(*w.shape[-2:])
    if reason:
        raise ShapeError(f"to_kernel: {reason}")
    return Q4Kernel(q4_layout.pack(w.packed, w.scales))


def from_kernel(w: Q4Kernel) -> Q4Array:
    """The exchange form of ``w``."""
    return Q4Array(*q4_layout.unpack(w.blocks))


def kernel_product(x: Array, w: Q4Kernel) -> Array:
    """``y = w·x`` on the GPU kernel, unchecked: x float32 [B, K], w [N, K] -> y float32 [B, N].

    Under ``vmap`` it makes one call after another.
    """
    return _gemv(x, w.blocks)


@custom_batching.sequential_vmap
def _gemv(x: Array, blocks: Array) -> Array:
    return q4_gemv.gemv(x, blocks)


def matrix(name: str, w: Array | Q4Array | Q4Kernel) -> Matrix:
    """What :func:`gdn_jax._core.backend.choose` needs to know of a weight [N, K]."""
    int4 = isinstance(w, Q4Array | Q4Kernel)
    return Matrix(name, w.shape, int4, not isinstance(w, Q4Array))


def check_int4(where: str, name: str, w: Any, dims: Sequence[tuple[str, int | None]]) -> None:
    """Raise ShapeError unless ``w`` is a whole Q4Array or Q4Kernel of these sizes [N, K]."""
    if not isinstance(w, Q4Kernel):
        check_q4(where, name, w, dims)
        return
    blocks = zip(("9", "64"), q4_layout.BLOCK, strict=True)
    check_array(
        where, f"{name}.blocks", w.blocks, [("N/64", None), ("K/64", None), *blocks], [jnp.int32]
    )
    if any(n not in (None, found) for (_, n), found in zip(dims, w.shape, strict=True)):
        needed = ", ".join(n if size is None else f"{n}={size}" for n, size in dims)
        raise ShapeError(f"{where}: {name} is int4 of shape {w.shape}; needed [{needed}]")
