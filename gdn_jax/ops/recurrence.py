"""The recurrence of one token: the delta rule, the norm of its keys, the decorator of a step."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.quant.project import rsqrt
from gdn_jax.types import Array

QK_NORM_EPS = 1e-6
"""Added to the sum of squares under the root of the q/k norm, as flash-linear-attention does."""


def step[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A step of a layer: named in a profile, its results behind an optimization barrier."""

    @functools.wraps(function)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(function.__name__):
            return lax.optimization_barrier(function(*args, **kwargs))

    return scoped


def l2_normalise(x: Array) -> Array:
    """``x · rsqrt(sum(x²) + 1e-6)`` over the last axis; a zero row stays zero."""
    return x * rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + QK_NORM_EPS)


@step
def delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array
) -> tuple[Array, Array]:
    """Step 5: the gated delta rule for one token.

    ``S' = exp(g)·S``; ``delta = (v - S'ᵀk)·beta``; ``S = S' + k⊗delta``; ``o = Sᵀq``, read from
    the updated state. q, k [HK, K], v [HV, V], g, beta [HV], S [HV, K, V] -> o [HV, V], S.
    Sums are products and reductions, not dots, so their order is fixed.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464.
    """
    groups = S.shape[-3] // k.shape[-2]
    q, k = (jnp.expand_dims(jnp.repeat(x, groups, axis=-2), -1) for x in (q, k))
    decayed = jnp.exp(g)[..., None, None] * S
    delta = (v - jnp.sum(decayed * k, axis=-2)) * beta[..., None]
    S = decayed + k * jnp.expand_dims(delta, -2)
    return jnp.sum(S * q, axis=-2), S
