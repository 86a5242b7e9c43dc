"""The residual stream between blocks: the sum that ends one, and the norm that begins the next.

After the last product y of each half of a block come ``x' = x + y`` and ``h = norm(x')``. Which
code adds depends on the route, and so does what is handed over, a :data:`Stream`::

               the last product            handed over                 the next norm
    XLA        y, and x' = x + y     ->    Array x'              ->    normed: h = norm(x')
    kernels    y as slices over K    ->    Partial(slices, x)    ->    normed: x' = sum(slices) + x
                                                                               h  = norm(x')

A matrix's kernel divides the columns among its CTAs; each CTA writes the sum over its own columns,
a slice of y. The kernel of the next norm reads x anyway and adds the slices to it. Only
:func:`joined` makes a Partial; only :func:`normed` and :func:`whole` make an array of one.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.models import kernels
from gdn_jax.models.route import Route, products
from gdn_jax.quant.project import Weight, rsqrt
from gdn_jax.types import Array


class Partial(NamedTuple):
    """A stream [B, 1, D] that is not added up yet: it is ``sum(slices) + residual``.

    ``slices`` float32 [splits, B, D], to be added in order; ``residual`` float32 [B, 1, D].
    """

    slices: Array
    residual: Array


Stream = Array | Partial
"""float32 [B, T, D]; or a Partial, for one token a row on kernels with thread-block clusters."""


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``(1 + w) · x · rsqrt(mean(x²) + eps)`` over the last axis."""
    normed = x * rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * lax.expand_dims(1.0 + weight, range(x.ndim - 1))


def whole(x: Stream) -> Array:
    """The stream as one array."""
    if isinstance(x, jax.Array):
        return x
    return functools.reduce(operator.add, x.slices)[:, None] + x.residual


def normed(x: Stream, weight: Array, eps: float) -> tuple[Array, Array]:
    """The stream as one array, and its :func:`rms_norm`; one launch for a :class:`Partial`."""
    if isinstance(x, jax.Array):
        return x, rms_norm(x, weight, eps)
    stream, h = kernels.sum_and_norm(x.slices, x.residual[:, 0], weight, eps)
    return stream[:, None], h[:, None]


def joined(slices: Array, residual: Array) -> Stream:
    """``residual`` plus a product in slices; the next norm's kernel adds them where it can run."""
    stream = Partial(slices, residual)
    return stream if kernels.adds_slices(residual.shape[-1]) else whole(stream)


def added(h: Array, w: Weight, residual: Array, route: Route) -> Stream:
    """``residual + w·h``, all [B, T, D]."""
    if h.shape[1] == 1 and route.backend == "pallas":
        return joined(kernels.sliced_product(h[:, 0], w), residual)
    (y,) = products(h, w, route=route)
    return residual + y
