"""The float32 matrix product of the projections."""

import functools

import jax.numpy as jnp
from jax import lax

from gdn_jax.types import Array

_FEW_ROWS = 8


def few_rows(x: Array) -> bool:
    """Whether x [.., K] has at most eight rows, which :func:`matmul` multiplies without a dot."""
    return x.size <= _FEW_ROWS * x.shape[-1]


def matmul(x: Array, w: Array) -> Array:
    """``y = w·x`` in float32: x [.., D], w [N, D] -> y [.., N].

    Up to eight rows, as when a few sequences decode, are multiplied one after another by
    :func:`products`, so that each has the same bits as when it is alone. More rows are one dot
    at ``Precision.HIGHEST``.
    """
    w = w.astype(jnp.float32)
    if few_rows(x):
        rows = x.reshape(-1, 1, x.shape[-1])
        y = products(rows, w) if len(rows) == 1 else lax.map(functools.partial(_apart, w), rows)
        return y.reshape(*x.shape[:-1], w.shape[0])
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=lax.Precision.HIGHEST)


def _apart(w: Array, row: Array) -> Array:
    # Without it, bits depend on whether the weights are an argument or a constant of the program.
    return products(*lax.optimization_barrier((row, w)))


def products(x: Array, w: Array) -> Array:
    """``y = w·x`` as products and a sum, float32.

    XLA sums one row in a tree, with a quarter of a dot's error (1e-7 against 4e-7 at D = 5120 on a
    CPU; 7e-7 when it takes several rows at once). On a GPU it uses no TF32, and calls no library
    that chooses its algorithm, and with it the bits, by timing.
    """
    return jnp.sum(jnp.expand_dims(x, -2) * lax.expand_dims(w, range(x.ndim - 1)), axis=-1)
