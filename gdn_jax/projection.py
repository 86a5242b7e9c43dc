"""The product with a weight of any kind, and the exact reciprocal root."""

import jax.numpy as jnp

from gdn_jax.linear import matmul
from gdn_jax.quant.kernel_layout import Q4Kernel
from gdn_jax.quant.matmul import matmul_f32
from gdn_jax.quant.q4array import Q4Array
from gdn_jax.types import Array

Weight = Array | Q4Array | Q4Kernel


def project(x: Array, w: Weight) -> Array:
    """``y = w·x`` in float32: x [.., D], w [N, D] -> y [.., N]; w a float array or int4."""
    return matmul_f32(x, w) if isinstance(w, Q4Array | Q4Kernel) else matmul(x, w)


def rsqrt(x: Array) -> Array:
    """``1/sqrt(x)`` from a correctly rounded root: the hardware's own rsqrt is 2 ulp off."""
    return 1.0 / jnp.sqrt(x)
