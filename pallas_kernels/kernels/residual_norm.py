"""The end of one block and the beginning of the next in one launch: ``x`` and its RMS norm.

Grid: a cluster for a row of x, whose CTAs of 128 threads share its columns and exchange their sums
of squares. Partial sums of the product that came before are added in the order of its columns and
the residual last, as XLA adds them.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.mosaic import cluster
from pallas_kernels.mosaic.layouts import channels, in_every_warp, load, rsqrt
from pallas_kernels.mosaic.mlir import sync
from pallas_kernels.support import has_clusters

PIECE = 128
"""Columns that a CTA takes at once, one a thread; D is a multiple of it."""


def unavailable_reason(D: int) -> str | None:
    """Why the kernel cannot take rows of D columns here; None when it can."""
    if D % PIECE:
        return f"rows have {D} columns; the kernel needs a multiple of {PIECE}"
    if tuning.norm_ctas(D // PIECE) > 1 and not has_clusters():
        return f"rows have {D} columns; the kernel needs a device with thread-block clusters"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "size", "interpret"))
def residual_norm(
    parts: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    size: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """``x = sum(parts) + residual`` and ``(1 + w) · x · rsqrt(mean(x²) + eps)``, float32 [B, D].

    Equal arguments give equal bits, and a row's bits do not depend on the others.

    Args:
        parts: float32 [splits, B, D], B at least 1.
        residual: float32 [B, D].
        weight: float32 [D].
        eps: of the norm.
        size: CTAs a row: 1, 2, 4 or 8, and a divisor of D/128; None takes
            :func:`pallas_kernels.tuning.norm_ctas`. More than one need clusters.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU; ``size`` must be 1.
    """
    B, D = residual.shape
    size = size or tuning.norm_ctas(D // PIECE)
    out = jax.ShapeDtypeStruct((B, D), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_body, eps, size, interpret is not None),
        out_type=[out, out],
        grid=(B,),
        grid_names=("row",),
        cluster=(size,) if size > 1 else (),
        cluster_names=("part",) if size > 1 else (),
        scratch_types=[plgpu.SMEM((PIECE,), jnp.float32), cluster.scratch(size)],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="residual_norm",
    )
    x, normed = kernel(parts, residual, weight)
    return x, normed


def _body(eps: float, size: int, interpreted: bool, *refs: Any) -> None:
    parts, residual, weight, x_out, normed_out, squares, mailbox = refs
    splits, D = parts.shape[0], parts.shape[2]
    row, own = lax.axis_index("row"), D // size
    first = lax.axis_index("part") * own if size > 1 else 0
    if size > 1:
        cluster.open_mailbox(mailbox)
    places = [pl.ds(first + p, PIECE) for p in range(0, own, PIECE)]

    def read(ref: Any) -> jax.Array:
        return load(ref, channels(PIECE))

    weights = [read(weight.at[at]) for at in places]  # [128] each, as all below
    xs = []
    for at in places:
        terms = [read(parts.at[s, row, at]) for s in range(splits)]
        xs.append(functools.reduce(operator.add, [*terms, read(residual.at[row, at])]))
    for at, x in zip(places, xs, strict=True):
        x_out[row, at] = x
    squares[...] = functools.reduce(operator.add, [x * x for x in xs])
    sync(interpreted)
    # Every warp adds all of them: a sum over warps would have their lanes write to one place.
    square = jnp.sum(load(squares, in_every_warp(PIECE)))
    if size > 1:
        cluster.wait()
        square = cluster.total(square, mailbox, size)
    factor = rsqrt(square / D + eps)
    for at, x, w in zip(places, xs, weights, strict=True):
        normed_out[row, at] = (1.0 + w) * (x * factor)
