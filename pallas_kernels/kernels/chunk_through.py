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
from pallas_kernels.mosaic.mlir import barrier
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
    *there, gates_there, begin, scale, S, o, S_after = refs[:11]
    parts = o.shape[0]
    *here, arrived = refs[11:]
    gates = here.pop(5 * parts)
    # Of q, k, v, T, P and o a reference for each part.
    *here, out = (here[n : n + parts] for n in range(0, len(here), parts))
    b, h, i = (lax.axis_index(name) for name in ("sequence", "head", "part"))
    hk, mine = lax.div(h, o.shape[2] // there[0].shape[2]), pl.ds(i * COLUMNS, COLUMNS)
    first, last = begin[b], begin[b + 1]
    factor, stages, results = scale[0], gates.shape[0], out[0].shape[0]
    multiply = functools.partial(products, interpreted=interpreted)

    def sync() -> None:
        if not interpreted:
            barrier()

    def fetch(chunk: Any, slot: Any) -> None:
        rows = pl.ds(chunk * CHUNK, CHUNK)
        for n in range(parts):
            q, k, v, T, P = (x.at[n] for x in there)
            sources = (q.at[rows, hk], k.at[rows, hk], v.at[rows, h, mine])
            for source, target in zip(
                (*sources, T.at[chunk, h], P.at[chunk, h]), here, strict=True
            ):
                plgpu.copy_gmem_to_smem(source, target[n].at[slot], arrived.at[slot])
        plgpu.copy_gmem_to_smem(gates_there.at[chunk, h], gates.at[slot], arrived.at[slot])

    def refill(chunk: Any) -> None:
        """The chunk that comes into the stage of this one, which nobody reads any more."""
        pl.when(chunk + stages < last)(
            lambda: fetch(chunk + stages, lax.rem(chunk - first, stages))
        )

    for slot in range(stages):
        pl.when(first + slot < last)(functools.partial(fetch, first + slot, jnp.int32(slot)))

    def step(chunk: Any, S: jax.Array) -> jax.Array:
        slot = lax.rem(chunk - first, stages)
        plgpu.barrier_wait(arrived.at[slot])
        q, k, v, T, P = ([part.at[slot] for part in x] for x in here)
        square = (COLUMNS, CHUNK)

        def read_in() -> Any:
            if stages > 1:
                # Beside products, for it takes as long as they do.
                pl.when(chunk > first)(lambda: refill(chunk - 1))
            rows = (load(gates.at[slot, n], BY_COLUMN) for n in (1, 2, 3))
            values = sum(plgpu.load(x.T, layout=SQUARE).astype(jnp.float32) for x in v)
            return *(by_column(row, square) for row in rows), values, S * gates[slot, 2, CHUNK - 1]

        def write(seen: jax.Array, here: Any) -> Any:
            beta, grown, _, values, _ = here
            return split((values - seen * grown) * beta, parts), here

        def grow(read: jax.Array, here: Any) -> jax.Array:
            return read * (here[1] * factor)

        states = split(S, parts)
        (written, (_, _, left, _, S)), read = multiply(
            *(Product(states, [part.T for part in x]) for x in (k, q)),
            beside=read_in,
            then=[write, grow],
        )
        [delta] = multiply(Product(written, [x.T for x in T]))

        def send(read: jax.Array, _: None) -> None:
            place = lax.rem(chunk - first, results)
            plgpu.wait_smem_to_gmem(results - 1, wait_read_only=True)
            sync()
            for result, value in zip(out, split(read, parts), strict=True):
                result.at[place].T[...] = value
            plgpu.commit_smem()
            sync()
            for n, result in enumerate(out):
                target = o.at[n, pl.ds(chunk * CHUNK, CHUNK), h, mine]
                plgpu.copy_smem_to_gmem(result.at[place], target, commit_group=False)
            plgpu.commit_smem_to_gmem_group()

        _, S = multiply(
            Product(split(delta, parts), [x.T for x in P], read),
            Product(split(delta * left, parts), k, S),
            then=[send, lambda S, _: S],
        )
        # Nobody reads this stage any more.
        plgpu.commit_smem()
        sync()
        if stages == 1:
            refill(chunk)
        return S

    state = load(S.at[b, h, mine], SQUARE)
    S_after[b, h, mine, :] = lax.fori_loop(first, last, step, state)
    plgpu.wait_smem_to_gmem(0)
