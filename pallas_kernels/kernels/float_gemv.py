"""float32, bfloat16 or float16 weights times float32 rows, in float32, for Mosaic GPU.

A CTA of four warps takes ``4·rows`` rows of weights, one K slice and up to eight rows of x. Each
warp owns ``rows`` rows; a lane owns ``vector`` neighbouring columns of every ``32·vector``. Weights
go from global memory straight to registers, several vectors of each row at once, and the next
ones are requested before the present ones are used. x comes from the first-level cache and serves
all rows of a warp. Rows of weights beyond a multiple of ``4·rows`` have a CTA each, whose four
warps do the same; nothing is masked, and nothing out of bounds is read.

CTAs in launch order: blocks of rows of x, then rows of weights, then K slices; so those that share
weights are neighbours and all but the first read them from the second-level cache.

Order of a sum over K: a lane's ``steps`` vectors one after another, these sums in order of
columns, then the lanes in a butterfly. It depends on the sizes alone, so results repeat bit for
bit. A row of x that is not finite touches no other row.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.jobs import Job, launch
from pallas_kernels.mosaic.layouts import load

WARPS = 4

UNIT = 32
"""K is a multiple of it: 16 lanes of two columns."""

ROWS_A_BLOCK = 8
"""Most rows of x that a CTA takes."""

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
"""What weights may be."""


def unavailable_reason(N: int, K: int) -> str | None:
    """Why the kernel cannot multiply weights [N, K]; None when it can."""
    if N > 0 and K > 0 and K % UNIT == 0:
        return None
    return f"weights are [{N}, {K}]; the kernel needs K to be a multiple of {UNIT}"


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def gemv(
    x: jax.Array,
    w: jax.Array,
    *,
    after: jax.Array | None = None,
    tiling: tuple[int, int, int] | None = None,
    interpret: Any = None,
) -> jax.Array:
    """``y = w·x`` in one launch: float32 [B, N].

    Args:
        x: float32 [B, K].
        w: float32, bfloat16 or float16 [N, K]; K a multiple of 32.
        after: an array that is not read, so that this call runs after the one that makes it.
        tiling: see :func:`job`.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.

    Raises:
        ValueError: sizes or types that do not fit.
    """
    if x.shape[0] == 0:
        return jnp.zeros((0, w.shape[0]), jnp.float32)
    work = job(x, w, tiling=tiling)
    ((y,),) = launch([work], name="float_gemv", after=after, interpret=interpret)
    return y[0]


def job(
    x: jax.Array,
    w: jax.Array,
    *,
    splits: int = 1,
    block: int = ROWS_A_BLOCK,
    tiling: tuple[int, int, int] | None = None,
) -> Job:
    """The share of every K slice in ``y = w·x``: a job with one output, float32 [splits, B, N].

    Args:
        x: float32 [B, K], B at least 1.
        w: float32, bfloat16 or float16 [N, K]; K a multiple of 32.
        splits: K slices; K must be a multiple of ``32·splits``.
        block: most rows of x that a CTA takes.
        tiling: rows of weights a warp owns, most vectors of a row that a lane requests at once,
            bytes of a vector; None takes :func:`pallas_kernels.tuning.float_gemv_tiling`.

    Raises:
        ValueError: sizes or types that do not fit.
    """
    (B, K), (N, columns) = x.shape, w.shape
    if w.dtype not in DTYPES or x.dtype != jnp.float32:
        raise ValueError(
            f"x is {x.dtype} and w {w.dtype}; x must be float32, w float32, bfloat16 or float16"
        )
    if reason := unavailable_reason(N, columns):
        raise ValueError(reason)
    if columns != K or splits < 1 or K % (UNIT * splits) or B < 1:
        raise ValueError(f"x {x.shape}, w {w.shape} and {splits} splits do not fit each other")
    share = _share(B, N, K // splits, w.dtype.itemsize, block, tiling)
    shape = (splits, share.pieces, share.vectors // share.pieces, share.vector)
    return Job(
        ctas=share.blocks * share.tiles * splits,
        operands=(x.reshape(B, *shape), w.reshape(N, *shape)),
        outs=(jax.ShapeDtypeStruct((splits, B, N), jnp.float32),),
        body=functools.partial(_body, share),
    )


class _Share(NamedTuple):
    """How the work is divided.

    B rows of x go to ``blocks`` CTAs of ``batch``; ``full`` tiles of ``rows`` rows of weights and
    ``rest`` single rows to one CTA each. A row of a K slice is ``vectors`` vectors of ``vector``
    columns, those of ``lanes`` lanes, taken in ``pieces``.
    """

    B: int
    blocks: int
    batch: int
    rows: int
    full: int
    rest: int
    lanes: int
    vector: int
    vectors: int
    pieces: int

    @property
    def tiles(self) -> int:
        """CTAs that share a block of rows of x and a K slice."""
        return self.full + self.rest


def _share(
    B: int, N: int, K: int, size: int, block: int, tiling: tuple[int, int, int] | None
) -> _Share:
    """For slices of K columns and weights of ``size`` bytes."""
    blocks = -(-B // block)
    batch = -(-B // blocks)
    per_warp, most, width = tiling or tuning.float_gemv_tiling(batch, size)
    lanes = 32 if K % 64 == 0 else 16
    vector = math.gcd(K // lanes, width // size)
    steps, rows = K // (lanes * vector), WARPS * per_warp
    pieces = next(n for n in range(1, steps + 1) if steps % n == 0 and steps // n <= most)
    return _Share(B, blocks, batch, rows, *divmod(N, rows), lanes, vector, steps * lanes, pieces)


def _body(share: _Share, index: Any, x: Any, w: Any, out: Any) -> None:
    """x [B, splits, pieces, vectors/pieces, vector] and w [N, ...] -> out [splits, B, N]."""
    first, index = lax.rem(index, share.blocks) * share.batch, lax.div(index, share.blocks)
    tile, split = lax.rem(index, share.tiles), lax.div(index, share.tiles)
    vectors = [x.at[jnp.minimum(first + b, share.B - 1), split] for b in range(share.batch)]

    def run(at: Any, many: bool) -> None:
        """Some rows of weights, or one."""
        sums = _sums(share, lambda piece: w.at[at, split, piece], vectors, many)
        for b, y in enumerate(sums):

            def store(b=b, y=y) -> None:
                out[split, first + b, at] = y

            # The last block may have fewer rows of x.
            always = (share.blocks - 1) * share.batch + b < share.B
            store() if always else pl.when(first + b < share.B)(store)

    def tile_of_rows() -> None:
        run(pl.ds(tile * share.rows, share.rows), True)

    def row_left_over() -> None:
        run(tile + share.full * (share.rows - 1), False)

    if not share.rest:
        tile_of_rows()
    elif not share.full:
        row_left_over()
    else:
        pl.when(tile < share.full)(tile_of_rows)
        pl.when(tile >= share.full)(row_left_over)


def _layout(lanes: int, vector: int, many: bool) -> Any:
    """[rows, lanes, vector] with a row a warp, or [lanes, vector] in every warp."""
    copies = 32 // lanes
    return plgpu.Layout.TILED(
        plgpu.Tiling((((WARPS,) * many + (lanes, vector)),)),
        warp_dims=(-3,) if many else (plgpu.Replicated(WARPS),),
        lane_dims=(-2,) if copies == 1 else (-2, plgpu.Replicated(copies)),
        vector_dim=-1,
    )


def _sums(
    share: _Share, weights: Callable[[Any], Any], vectors: list[Any], many: bool
) -> list[jax.Array]:
    """The products of each vector with the weights: [rows] each, or a scalar for a single row."""
    layout = _layout(share.lanes, share.vector, many)
    x_layout = layout.reduce(0) if many else layout

    def read(piece: Any) -> jax.Array:
        return load(weights(piece), layout)  # [rows, vectors/pieces, vector], or without rows

    def add(sums: list[jax.Array], piece: Any, words: jax.Array) -> list[jax.Array]:
        wide, added = words.astype(jnp.float32), []
        for total, ref in zip(sums, vectors, strict=True):
            x = load(ref.at[piece], x_layout)  # [vectors/pieces, vector]
            if many:
                x = plgpu.layout_cast(lax.broadcast_in_dim(x, wide.shape, (1, 2)), layout)
            added.append(total + jnp.sum(wide * x, axis=-1))
        return added

    def step(piece: Any, carry: Any) -> Any:
        sums, words = carry
        ahead = read(piece + 1)
        return add(sums, piece, words), ahead

    words = read(0)
    zero = jnp.zeros(words.shape[:-1], jnp.float32)  # [rows, vectors/pieces]
    sums = [plgpu.layout_cast(zero, layout.reduce(zero.ndim)) for _ in vectors]
    sums, words = lax.fori_loop(0, share.pieces - 1, step, (sums, words))
    return [jnp.sum(total, axis=-1) for total in add(sums, share.pieces - 1, words)]
