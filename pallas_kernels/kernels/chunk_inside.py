"""The part of a chunk of 64 tokens that needs no state, for the value heads of a key head.

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
from pallas_kernels.mosaic.mlir import sync
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
        # The last axis of the grid may be long; the others end at 65535.
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
        # Only the exponential is approximate, to two units in the last place.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        interpret=interpret,
        kernel_name="gdn_chunk_inside",
    )
    return kernel(q, k, gates, scale[None])


def _body(interpreted: bool, *refs: Any) -> None:
    cta = _Cta(interpreted, *refs)
    cta.fetch()
    places: Any = (
        plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=SQUARE) for axis in (0, 1)
    )
    head = functools.partial(cta.value_head, tuple(places))
    lax.fori_loop(0, cta.group, head, None)
    plgpu.wait_smem_to_gmem(0)


class _Cta:
    """One CTA while it is traced: a chunk and a key head with its ``group`` value heads."""

    def __init__(self, interpreted: bool, *refs: Any) -> None:
        self.q, self.k, self.gates, scale, self.T, self.P, *here = refs
        *here, self.scratch, self.down, self.along, self.arrived = here
        self.interpreted, self.parts = interpreted, self.q.shape[0]
        self.group = self.gates.shape[1] // self.q.shape[2]
        # One reference for each part of q, k, T and P.
        self.queries, self.keys, self.inverse, self.scores = (
            here[n : n + self.parts] for n in range(0, len(here), self.parts)
        )
        self.chunk, self.head = lax.axis_index("chunk"), lax.axis_index("head")
        self.factor = scale[0]

    def fetch(self) -> None:
        """Fetch q, k and the gates of the value heads, and wait for them."""
        rows = pl.ds(self.chunk * CHUNK, CHUNK)
        for n in range(self.parts):
            for given, copies in ((self.q, self.queries), (self.k, self.keys)):
                plgpu.copy_gmem_to_smem(given.at[n, rows, self.head], copies[n], self.arrived)
        for copy in (self.down, self.along):
            source = self.gates.at[self.chunk, pl.ds(self.head * self.group, self.group)]
            plgpu.copy_gmem_to_smem(source, copy, self.arrived)
        plgpu.barrier_wait(self.arrived)

    def value_head(self, places: tuple[jax.Array, jax.Array], i: Any, _: None) -> None:
        """P and T of value head i; ``places`` are the row and the column of each number.

        Every array but beta is [64, 64].
        """
        # Computed again for each head: fewer registers, so more CTAs share a multiprocessor.
        turned = [x.T for x in self.keys]  # [K, 64] each
        kk, qk = products(
            *(Product(x, turned) for x in (self.keys, self.queries)),
            interpreted=self.interpreted,
        )
        P = qk * self._decays(i, operator.ge, *places) * self.factor
        for ref, part in zip(self.scores, split(P, self.parts), strict=True):
            ref[...] = part
        plgpu.commit_smem()
        sync(self.interpreted)
        self._send(self.scores, self.P, i)
        # Loaded again after the barrier, for the same reason.
        beta = load(self.down.at[i, 1], BY_ROW)  # [64]
        below = kk * self._decays(i, operator.gt, *places) * by_row(-beta, (CHUNK, CHUNK))  # -A
        unit_lower.write_inverse(below, self.scratch, self.inverse, self.scores, self.interpreted)
        self._send(self.inverse, self.T, i)

    def _decays(self, i: Any, keep: Callable[..., Any], row: Any, column: Any) -> jax.Array:
        """M where ``keep(row, column)`` holds, and zeros."""

        def difference(n: int) -> jax.Array:
            down = load(self.down.at[i, n], BY_ROW)  # [64]
            along = load(self.along.at[i, n], BY_COLUMN)  # [64]
            return by_row(down, (CHUNK, CHUNK)) - by_column(along, (CHUNK, CHUNK))

        apart = difference(0) if self.parts == 1 else difference(0) + difference(4)
        return jnp.exp(jnp.where(keep(row, column), apart, -jnp.inf))

    def _send(self, parts: Any, out: Any, i: Any) -> None:
        """Copy from shared to global memory, for value head i."""
        for n in range(self.parts):
            target = out.at[n, self.chunk, self.head * self.group + i]
            plgpu.copy_smem_to_gmem(parts[n], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
