"""The gates of the delta rule: how much a token writes, and how much of the state stays."""

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.types import Array


def softplus(x: Array) -> Array:
    """``log(1 + exp(x))`` in three branches: x above 20, exp(x) below -20, else log1p(exp(x))."""
    # Clipped well outside its branch, since the gradient of clip is half at a bound.
    middle = jnp.log1p(jnp.exp(jnp.clip(x, -32.0, 32.0)))
    return jnp.where(x > 20.0, x, jnp.where(x < -20.0, jnp.exp(jnp.minimum(x, 0.0)), middle))


def gates(b: Array, a: Array, A_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """``beta = sigmoid(b)`` and ``g = -exp(A_log) · softplus(a + dt_bias)``, never positive.

    b, a float32 [.., HV], A_log, dt_bias float32 [HV] -> beta, g [.., HV].
    """
    lead = range(a.ndim - 1)
    # A scan hoists exp(A_log) out of its loop; the barrier keeps it apart without a scan as well.
    A = lax.optimization_barrier(jnp.exp(A_log))
    A, dt_bias = (lax.expand_dims(p, lead) for p in (A, dt_bias))
    return jax.nn.sigmoid(b), -A * softplus(a + dt_bias)
