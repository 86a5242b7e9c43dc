"""The float32 matrix product of the projections."""

import jax.numpy as jnp
from jax import lax

from gdn_jax.types import Array

_ROWWISE_LIMIT = 8


def few_rows(x: Array) -> bool:
    """Whether x [.., K] has at most eight rows, so that a product is reduced row by row."""
    return x.size <= _ROWWISE_LIMIT * x.shape[-1]


def matmul(x: Array, w: Array) -> Array:
    """``y = w·x`` in float32: x [.., D], w [N, D] -> y [.., N].

    Up to eight rows are reduced as products and a sum, which XLA adds up in a tree: the error is a
    quarter of a dot's, a row's bits do not depend on its neighbours, and no TF32 can slip in.
    More rows are one dot at ``Precision.HIGHEST``.
    """
    if not few_rows(x):
        w = w.astype(jnp.float32)
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        return lax.dot_general(x, w, dims, precision=lax.Precision.HIGHEST)
    products = jnp.expand_dims(x, -2) * lax.expand_dims(w.astype(jnp.float32), range(x.ndim - 1))
    return jnp.sum(products, axis=-1)
