"""The state through the chunks of a sequence, and their outputs.

Grid: a CTA of 128 threads for a sequence, a value head and 64 columns of its state, chunk after
chunk. The state is held transposed, [64, K] float32 in registers, so that every product takes its
left side from registers and nothing between two products passes through shared memory:

    W = beta·(v - exp(G)·Sᵀk)          [64 columns of V, 64 tokens]
    delta = W·Tᵀ
    o = scale·exp(G)·Sᵀq + delta·Pᵀ
    S <- exp(G[last])·S + (delta·exp(G[last] - G))·k

Memory: q, k, v, T, P and the gates of the next chunks come by bulk copies into a ring of stages.
Left sides are rounded to the parts of :mod:`tensor_cores`; sums and the state stay float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.layouts import load
from pallas_kernels.mosaic.mlir import sync
from pallas_kernels.mosaic.tensor_cores import (
    BY_COLUMN,
    SQUARE,
    Product,
    by_column,
    products,
    shared,
    split,
)
from pallas_kernels.support import size_reason
from pallas_kernels.tuning import CHUNK, HEAD_DIMS

COLUMNS = 64
"""Columns of a head's state that a CTA owns."""
GATES = 5
"""Rows of the gates: G, beta, exp(G), exp(G[last] - G), and what G lacks by rounding."""


def unavailable_reason(K: int | None, V: int | None) -> str | None:
    """Why the kernel cannot take heads [K, V]; None when it can, or might."""
    return size_reason("K", K, HEAD_DIMS) or size_reason("V", V, HEAD_DIMS)


class Chunks(NamedTuple):
    """Chunks of 64 tokens, those of a sequence one after another.

    q, k [parts, 64·n, HK, K], v [parts, 64·n, HV, V], T and P [parts, n, HV, 64, 64], bfloat16;
    gates float32 [n, HV, 5, 64].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    T: jax.Array
    P: jax.Array
    gates: jax.Array


def through(
    chunks: Chunks,
    begin: jax.Array,
    scale: jax.Array,
    S: jax.Array,
    *,
    stages: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [parts, 64·n, HV, V] and the states after the last chunk of each sequence.

    Args:
        chunks: of all sequences; padding has beta and gates of zero.
        begin: int32 [N + 1], the first chunk of each sequence, and where the last one ends.
        scale: float32 [].
        S: float32 [N, HV, V, K], transposed.
        stages: chunks in shared memory at a time.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.

    Returns:
        o, in bfloat16 parts like v, and the states like S.
    """
    parts, tokens, HV, V = chunks.v.shape
    N, K = S.shape[0], S.shape[3]
    tiles = [shared(stages, CHUNK, width) for width in (K, K, COLUMNS, CHUNK, CHUNK)]
    results = 2 if parts == 1 else 1
    kernel = plgpu.kernel(
        functools.partial(_body, interpret is not None),
        out_type=[
            jax.ShapeDtypeStruct((parts, tokens, HV, V), jnp.bfloat16),
            jax.ShapeDtypeStruct(S.shape, jnp.float32),
        ],
        grid=(N, HV, V // COLUMNS),
        grid_names=("sequence", "head", "part"),
        scratch_types=[
            *(tile for tile in tiles for _ in range(parts)),
            plgpu.SMEM((stages, GATES, CHUNK), jnp.float32),
            *(shared(results, CHUNK, COLUMNS) for _ in range(parts)),
            plgpu.Barrier(num_arrivals=5 * parts + 1, num_barriers=stages),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="gdn_chunk_through",
    )
    return kernel(*chunks, begin, scale[None], S)


def _body(interpreted: bool, *refs: Any) -> None:
    cta = _Cta(interpreted, *refs)
    first, last = cta.first, cta.last
    for slot in range(cta.stages):
        pl.when(first + slot < last)(functools.partial(cta.fetch, first + slot, jnp.int32(slot)))
    own = cta.b, cta.h, cta.mine
    state = load(cta.S.at[own], SQUARE)  # [64, K]
    cta.S_after[(*own, slice(None))] = lax.fori_loop(first, last, cta.advance, state)
    plgpu.wait_smem_to_gmem(0)


class _Stage(NamedTuple):
    """References to the parts of q, k, v, T and P: of all chunks, of the ring, or of one stage."""

    q: Any
    k: Any
    v: Any
    T: Any
    P: Any


class _Beside(NamedTuple):
    """What is computed while a chunk's first products run: all [64, 64] but S [64, K]."""

    beta: jax.Array
    grown: jax.Array
    left: jax.Array
    values: jax.Array
    S: jax.Array


class _Cta:
    """One CTA while it is traced: a sequence ``b``, a value head ``h``, 64 columns of its state."""

    def __init__(self, interpreted: bool, *refs: Any) -> None:
        *given, self.gates_given, begin, scale, self.S, self.o, self.S_after = refs[:11]
        *ring, self.arrived = refs[11:]
        self.interpreted, self.parts = interpreted, self.o.shape[0]
        self.gates = ring.pop(5 * self.parts)
        # One reference for each part of q, k, v, T, P and o.
        *ring, self.out = (ring[n : n + self.parts] for n in range(0, len(ring), self.parts))
        self.given, self.ring = _Stage(*given), _Stage(*ring)
        self.b, self.h, i = (lax.axis_index(name) for name in ("sequence", "head", "part"))
        self.hk = lax.div(self.h, self.o.shape[2] // self.given.q.shape[2])
        self.mine = pl.ds(i * COLUMNS, COLUMNS)
        self.first, self.last, self.factor = begin[self.b], begin[self.b + 1], scale[0]
        self.stages, self.results = self.gates.shape[0], self.out[0].shape[0]
        self.multiply = functools.partial(products, interpreted=interpreted)

    def fetch(self, chunk: Any, slot: Any) -> None:
        """Request the copies of a chunk into a stage."""
        rows, arrived = pl.ds(chunk * CHUNK, CHUNK), self.arrived
        for n in range(self.parts):
            q, k, v, T, P = (x.at[n] for x in self.given)
            keys, values = (rows, self.hk), (rows, self.h, self.mine)
            sources = q.at[keys], k.at[keys], v.at[values], T.at[chunk, self.h], P.at[chunk, self.h]
            for source, target in zip(sources, self.ring, strict=True):
                plgpu.copy_gmem_to_smem(source, target[n].at[slot], arrived.at[slot])
        gates = self.gates_given.at[chunk, self.h]
        plgpu.copy_gmem_to_smem(gates, self.gates.at[slot], arrived.at[slot])

    def advance(self, chunk: Any, S: jax.Array) -> jax.Array:
        """The four equations for one chunk: S [64, K] before and after it."""
        slot = lax.rem(chunk - self.first, self.stages)
        plgpu.barrier_wait(self.arrived.at[slot])
        own = _Stage(*([part.at[slot] for part in x] for x in self.ring))
        states = split(S, self.parts)  # [64, K] each
        (written, beside), read = self.multiply(
            *(Product(states, _turned(x)) for x in (own.k, own.q)),
            beside=lambda: self._read_in(chunk, slot, own.v, S),
            then=[self._written, self._read],
        )
        [delta] = self.multiply(Product(written, _turned(own.T)))  # [64, 64]
        _, S = self.multiply(
            Product(split(delta, self.parts), _turned(own.P), read),
            Product(split(delta * beside.left, self.parts), own.k, beside.S),
            then=[lambda o, _: self._send(chunk, o), lambda S, _: S],
        )
        # No product reads this stage any more.
        plgpu.commit_smem()
        sync(self.interpreted)
        if self.stages == 1:
            self._refill(chunk)
        return S

    def _refill(self, chunk: Any) -> None:
        """Fetch the chunk that takes the stage of this one, which no product reads any more."""
        pl.when(chunk + self.stages < self.last)(
            lambda: self.fetch(chunk + self.stages, lax.rem(chunk - self.first, self.stages))
        )

    def _read_in(self, chunk: Any, slot: Any, v: Any, S: jax.Array) -> _Beside:
        """beta, exp(G) and exp(G[last] - G) along the tokens, v, and S decayed."""
        if self.stages > 1:
            # Beside products, for it takes as long as they do.
            pl.when(chunk > self.first)(lambda: self._refill(chunk - 1))
        values: Any = sum(plgpu.load(x.T, layout=SQUARE).astype(jnp.float32) for x in v)
        beta, grown, left = (
            by_column(load(self.gates.at[slot, n], BY_COLUMN), (COLUMNS, CHUNK)) for n in (1, 2, 3)
        )
        return _Beside(beta, grown, left, values, S * self.gates[slot, 2, CHUNK - 1])

    def _written(self, seen: jax.Array, beside: _Beside) -> tuple[list[jax.Array], _Beside]:
        """Parts of W [64, 64] from Sᵀk."""
        beta, grown, _, values, _ = beside
        return split((values - seen * grown) * beta, self.parts), beside

    def _read(self, read: jax.Array, beside: _Beside) -> jax.Array:
        """The share of o [64, 64] that comes from the state before the chunk, from Sᵀq."""
        return read * (beside.grown * self.factor)

    def _send(self, chunk: Any, o: jax.Array) -> None:
        """Write the outputs [64, 64] of a chunk through shared memory, where rows are tokens."""
        place = lax.rem(chunk - self.first, self.results)
        plgpu.wait_smem_to_gmem(self.results - 1, wait_read_only=True)
        sync(self.interpreted)
        for result, value in zip(self.out, split(o, self.parts), strict=True):
            result.at[place].T[...] = value
        plgpu.commit_smem()
        sync(self.interpreted)
        for n, result in enumerate(self.out):
            target = self.o.at[n, pl.ds(chunk * CHUNK, CHUNK), self.h, self.mine]
            plgpu.copy_smem_to_gmem(result.at[place], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()


def _turned(parts: list[Any]) -> list[Any]:
    return [part.T for part in parts]
