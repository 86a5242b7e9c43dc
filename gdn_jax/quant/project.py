"""The product with a weight of any kind, and the exact reciprocal root."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.quant.dense import matmul
from gdn_jax.quant.kernel_layout import Q4Kernel
from gdn_jax.quant.matmul import exchange_form, matmul_f32
from gdn_jax.quant.q4array import Q4Array, dequantize
from gdn_jax.types import Array

Weight = Array | Q4Array | Q4Kernel


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["narrow_result"]
)
@dataclasses.dataclass(frozen=True)
class Rounded:
    """A weight for products of many rows: operands rounded to bfloat16, sums in float32.

    With ``narrow_result`` the sums are rounded to bfloat16 at last: half the memory.
    """

    weight: Weight
    narrow_result: bool = False


def project(x: Array, w: Weight | Rounded) -> Array:
    """``y = w·x`` in float32: x [.., D], w [N, D] -> y [.., N]; w a float array or int4.

    Of a :class:`Rounded` weight as it says.
    """
    if isinstance(w, Rounded):
        return _rounded(x, w.weight, jnp.bfloat16 if w.narrow_result else jnp.float32)
    return matmul_f32(x, w) if isinstance(w, Q4Array | Q4Kernel) else matmul(x, w)


def _rounded(x: Array, w: Weight, result: Any) -> Array:
    if isinstance(w, Q4Array | Q4Kernel):
        w = dequantize(exchange_form(w), jnp.bfloat16)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    x, w = (a.astype(jnp.bfloat16) for a in (x, w))
    return lax.dot_general(x, w, dims, preferred_element_type=result)


def rsqrt(x: Array) -> Array:
    """``1/sqrt(x)`` from a correctly rounded root: the hardware's own rsqrt is 2 ulp off."""
    return 1.0 / jnp.sqrt(x)
