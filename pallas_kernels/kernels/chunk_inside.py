"""What a chunk of 64 tokens gives without its state, for the value heads of a key head.

Grid: a CTA of 128 threads for a chunk and a key head, whose q and k are copied in bulk once. Then
for each value head, with G the sum of its gates from the chunk's start on,

    M[i, j] = exp(G[i] - G[j])                  for i >= j, masked before the exponential
    (I + A)·T = I,  A[i, j] = beta[i]·M[i, j]·(k[i]·k[j])   for i > j
    P[i, j] = scale·M[i, j]·(q[i]·k[j])         for i >= j

T by :mod:`unit_lower`, products on the tensor cores, both stored as bfloat16 parts. No exponent is
positive.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import unit_lower
from pallas_kernels.mosaic.layouts import load
from pallas_kernels.mosaic.mlir import barrier
from pallas_kernels.mosaic.tensor_cores import (
    BY_COLUMN,
    BY_ROW,
    SQUARE,
    Product,
    by_column,
    by_row,
    products,
    shared,
    split,
)
from pallas_kernels.support import size_reason
from pallas_kernels.tuning import CHUNK, HEAD_DIMS


def unavailable_reason(K: int | None, chunk: int | None) -> str | None:
    """Why the kernel cannot take such keys and chunks; None when it can, or might."""
    if chunk is not None and chunk != CHUNK:
        return f"chunks of {chunk} tokens, the kernel needs {CHUNK}"
    return size_reason("K", K, HEAD_DIMS)


def inside(
    q: jax.Array, k: jax.Array, gates: jax.Array, scale: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """T and P, bfloat16 [parts, n, HV, 64, 64].

    Args:
        q, k: bfloat16 parts [parts, 64·n, HK, K].
        gates: float32 [n, HV, rows, 64]; row 0 is G, row 1 beta, row 4 what G lacks by rounding,
            which is read for more than one part.
        scale: float32 [].
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.
    """
    parts, tokens, HK, K = q.shape
    n, HV, rows = gates.shape[:3]
    out = jax.ShapeDtypeStruct((parts, n, HV, CHUNK, CHUNK), jnp.bfloat16)
    kernel = plgpu.kernel(
        functools.partial(_body, interpret is not None),
        out_type=[out, out],
        # The last axis may be long, the others end at 65535.
        grid=(HK, tokens // CHUNK),
        grid_names=("head", "chunk"),
        scratch_types=[
            *(shared(CHUNK, width) for width in (K, K, CHUNK, CHUNK) for _ in range(parts)),
            unit_lower.scratch(),
            # The compiler reads a reference in one layout: by row and by column need one each.
            plgpu.SMEM((HV // HK, rows, CHUNK), jnp.float32),
            plgpu.SMEM((HV // HK, rows, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * parts + 2),
        ],
        # Approximate is the exponential, to two units in the last place.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        interpret=interpret,
        kernel_name="gdn_chunk_inside",
    )
    return kernel(q, k, gates, scale[None])


def _body(interpreted: bool, *refs: Any) -> None:
    q, k, gates, scale, T, P, *here, scratch, down_here, along_here, arrived = refs
    parts, group = q.shape[0], gates.shape[1] // q.shape[2]
    # Of q, k, T and P a reference for each part.
    queries, keys, inverse, scores = (here[n : n + parts] for n in range(0, len(here), parts))
    chunk, head = lax.axis_index("chunk"), lax.axis_index("head")
    factor, rows, square = scale[0], pl.ds(chunk * CHUNK, CHUNK), (CHUNK, CHUNK)
    for n in range(parts):
        for there, here in ((q, queries), (k, keys)):
            plgpu.copy_gmem_to_smem(there.at[n, rows, head], here[n], arrived)
    for here in (down_here, along_here):
        plgpu.copy_gmem_to_smem(gates.at[chunk, pl.ds(head * group, group)], here, arrived)
    plgpu.barrier_wait(arrived)
    turned = [x.T for x in keys]
    multiply = functools.partial(products, interpreted=interpreted)
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, square, axis, layout=SQUARE) for axis in (0, 1)
    )

    def send(here: Any, there: Any, i: Any) -> None:
        for n in range(parts):
            target = there.at[n, chunk, head * group + i]
            plgpu.copy_smem_to_gmem(here[n], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def decays(i: Any, keep: Callable[[Any, Any], Any]) -> jax.Array:
        """exp(G[row] - G[column]), and zeros."""

        def difference(n: int) -> jax.Array:
            down, along = load(down_here.at[i, n], BY_ROW), load(along_here.at[i, n], BY_COLUMN)
            return by_row(down, square) - by_column(along, square)

        apart = difference(0) if parts == 1 else difference(0) + difference(4)
        return jnp.exp(jnp.where(keep(row, column), apart, -jnp.inf))

    def value_head(i: Any, _: None) -> None:
        # Made again for each head: fewer registers, so more CTAs share a multiprocessor.
        kk, qk = multiply(*(Product(x, turned) for x in (keys, queries)))
        P_here = qk * decays(i, operator.ge) * factor
        for there, part in zip(scores, split(P_here, parts), strict=True):
            there[...] = part
        plgpu.commit_smem()
        if not interpreted:
            barrier()
        send(scores, P, i)
        # Loaded again after the barrier, for the same reason.
        beta = load(down_here.at[i, 1], BY_ROW)
        below = kk * decays(i, operator.gt) * by_row(-beta, square)
        unit_lower.write_inverse(below, scratch, inverse, scores, interpreted)
        send(inverse, T, i)

    lax.fori_loop(0, group, value_head, None)
    plgpu.wait_smem_to_gmem(0)
