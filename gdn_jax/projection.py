"""The product with a weight of any kind, and the exact reciprocal root."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.linear import matmul
from gdn_jax.quant.kernel_layout import Q4Kernel
from gdn_jax.quant.matmul import exchange_form, matmul_f32
from gdn_jax.quant.q4array import Q4Array, dequantize
from gdn_jax.types import Array

Weight = Array | Q4Array | Q4Kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
    """A weight for products of many rows: operands rounded to bfloat16, sums in float32."""

    weight: Weight


def project(x: Array, w: Weight | Rounded) -> Array:
    """``y = w·x`` in float32: x [.., D], w [N, D] -> y [.., N]; w a float array or int4."""
    if isinstance(w, Rounded):
        return _rounded(x, w.weight)
    return matmul_f32(x, w) if isinstance(w, Q4Array | Q4Kernel) else matmul(x, w)


def _rounded(x: Array, w: Weight) -> Array:
    if isinstance(w, Q4Array | Q4Kernel):
        w = dequantize(exchange_form(w), jnp.bfloat16)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    x, w = (a.astype(jnp.bfloat16) for a in (x, w))
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)


def rsqrt(x: Array) -> Array:
    """``1/sqrt(x)`` from a correctly rounded root: the hardware's own rsqrt is 2 ulp off."""
    return 1.0 / jnp.sqrt(x)
