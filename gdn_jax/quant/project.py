"""The product with a weight of any kind, and the exact reciprocal root."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.quant.dense import matmul
from gdn_jax.quant.kernel_layout import Q4Kernel
from gdn_jax.quant.q4_matmul import exchange_form, matmul_f32
from gdn_jax.quant.q4array import Q4Array, dequantize
from gdn_jax.types import Array

Weight = Array | Q4Array | Q4Kernel


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["narrow_result"]
)
@dataclasses.dataclass(frozen=True)
class Rounded:
    """A weight for products of many rows: operands rounded to bfloat16, sums in float32.

    With ``narrow_result`` the finished sums are rounded to bfloat16 as well, for half the memory.
    """

    weight: Weight
    narrow_result: bool = False


def project(x: Array, w: Weight | Rounded) -> Array:
    """``y = w·x`` in float32: x [.., D], w [N, D] -> y [.., N].

    A :class:`Rounded` weight is multiplied as that class says.
    """
    match w:
        case Rounded(weight, narrow_result):
            return _bfloat16_dot(x, weight, jnp.bfloat16 if narrow_result else jnp.float32)
        case Q4Array() | Q4Kernel():
            return matmul_f32(x, w)
        case _:
            return matmul(x, w)


def _bfloat16_dot(x: Array, w: Weight, result: Any) -> Array:
    match w:
        case Q4Array() | Q4Kernel():
            narrow = dequantize(exchange_form(w), jnp.bfloat16)
        case _:
            narrow = w.astype(jnp.bfloat16)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(jnp.bfloat16), narrow, dims, preferred_element_type=result)


def rsqrt(x: Array) -> Array:
    """``1/sqrt(x)`` from a correctly rounded root: the hardware's own rsqrt is 2 ulp off."""
    return 1.0 / jnp.sqrt(x)
