"""The residual stream between blocks: what one adds to it, and the norm that the next one begins.

On the kernels a token's last product leaves its K slices unadded, for the kernel that makes the
next norm adds them too.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.models.route import Route, products, sliced_product
from gdn_jax.quant.project import Weight, rsqrt
from gdn_jax.types import Array
from pallas_kernels.kernels import residual_norm


class Partial(NamedTuple):
    """A stream [B, 1, D] in parts: ``sum(parts) + residual``; parts float32 [splits, B, D]."""

    parts: Array
    residual: Array


Stream = Array | Partial


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``(1 + w) · x · rsqrt(mean(x²) + eps)`` over the last axis."""
    normed = x * rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * lax.expand_dims(1.0 + weight, range(x.ndim - 1))


def whole(x: Stream) -> Array:
    """The stream as one array."""
    if isinstance(x, jax.Array):
        return x
    return functools.reduce(operator.add, x.parts)[:, None] + x.residual


def normed(x: Stream, weight: Array, eps: float) -> tuple[Array, Array]:
    """The stream as one array, and :func:`rms_norm` of it; of a :class:`Partial` in one launch."""
    if isinstance(x, jax.Array):
        return x, rms_norm(x, weight, eps)
    stream, h = residual_norm.residual_norm(x.parts, x.residual[:, 0], weight, eps=eps)
    return stream[:, None], h[:, None]


def joined(parts: Array, residual: Array) -> Stream:
    """The stream with K slices of a product, left to the next norm where its kernel can run."""
    found = Partial(parts, residual)
    fits = residual_norm.unavailable_reason(residual.shape[-1]) is None
    return found if fits else whole(found)


def added(h: Array, w: Weight, residual: Array, route: Route) -> Stream:
    """``residual + w·h``, all [B, T, D]."""
    if h.shape[1] == 1 and route.backend == "pallas":
        return joined(sliced_product(h[:, 0], w), residual)
    (y,) = products(h, w, route=route)
    return residual + y
