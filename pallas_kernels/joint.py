"""Joint products: one x times several matrices, in one kernel launch."""

import functools
import itertools
import operator
from typing import Any

import jax

from pallas_kernels.jobs import launch
from pallas_kernels.layer import projections


@functools.partial(jax.jit, static_argnames="interpret")
def slices(x: jax.Array, *weights: jax.Array, interpret: Any = None) -> tuple[jax.Array, ...]:
    """``y = w·x`` for every w as partial sums over slices of K: float32 [splits, B, N] each.

    The slices are to be added in order.

    Args:
        x: float32 [B, K], B at least 1.
        weights: float [N, K], or blocks of :mod:`pallas_kernels.q4_layout`.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU; float weights only.

    Raises:
        ValueError: sizes or types that do not fit.
    """
    outs = launch(projections(x, *weights), name="products", interpret=interpret)
    return tuple(itertools.chain(*outs))


def products(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
    """``y = w·x``, float32 [B, N] each: :func:`slices`, which XLA adds."""
    return tuple(functools.reduce(operator.add, part) for part in slices(x, *weights))
