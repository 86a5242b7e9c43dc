"""int4 weights times float32 rows on integer tensor cores, for Mosaic GPU.

A CTA of four warps takes 64 rows of weights and one K slice, the columns ``64·steps`` of split s,
and writes its share of the sum: grid (N/64, splits, blocks of rows of x). Weights go from global
memory straight to registers, all steps requested at once; the activations' digits, made while
those loads are on their way, lie in shared memory: 512 bytes a step for each two rows of x.

Digits. With ``m`` the largest magnitude of a row of x in the slice and ``2**(e-1) <= m < 2**e``,

    round(x · 2**(30 - e)) = sum_d digit_d · 256**d,   digit_d in -128..127,  d in 0..3

so x is exact to ``2**(e-31)``; e is at least -90. Nibbles stand in the high half of their byte,
which is 16 times the integer, so a product of two int8 is exact and int32 sums are too:

    y = sum_g scale_g · sum_d 2**(8·d + e - 34) · (16·integers · digits_d)_g

The sums over a group's 32 columns are exact; those over groups are float32, in order of columns.

Columns of the m16n8k32 product: one row of x takes all eight, digit d of group 2·p in column d for
k < 16 and of group 2·p + 1 in column 4 + d for k >= 16 (low nibbles, then high ones). Two rows of
x take four columns each, and k runs over one group, low nibbles then high ones.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.q4_fragments import (
    ACC,
    BIAS,
    DIGITS,
    LOWEST,
    SCALES,
    WARPS,
    WORDS,
    add_products,
    barrier,
    store_digits,
    store_peak,
)
from pallas_kernels.q4_layout import BLOCK, TILE, shape_reason

ROWS_A_BLOCK = 8
"""Rows of x that a CTA takes; more rows are more CTAs on the same weights."""

_STEPS = 10
"""Most blocks of weights that a CTA requests at once: 5 registers each."""

_INF, _NAN = 0x7F800000, 0x7FC00000


def unavailable_reason(N: int, K: int) -> str | None:
    """Why the kernel cannot multiply weights [N, K]; None when it can."""
    return shape_reason(N, K)


def default_splits(K: int) -> int:
    """K slices: the fewest whose columns a CTA can request at once."""
    tiles = K // TILE
    return tiles // max(n for n in range(1, _STEPS + 1) if tiles % n == 0)


def gemv(x: jax.Array, w: jax.Array, *, splits: int | None = None) -> jax.Array:
    """``y = w·x``: x float32 [B, K], w the blocks of weights [N, K] -> y float32 [B, N].

    The partial sums of :func:`gemv_parts`, added in order of their columns. Equal arguments give
    equal bits. A row of x that is not finite gives a row of NaN and touches no other.
    """
    return functools.reduce(operator.add, gemv_parts(x, w, splits=splits))


@functools.partial(jax.jit, static_argnames="splits")
def gemv_parts(
    x: jax.Array,
    w: jax.Array,
    layer: jax.Array | None = None,
    *,
    splits: int | None = None,
    after: jax.Array | None = None,
) -> jax.Array:
    """Each K slice's share of ``y = w·x``: float32 [splits, B, N].

    Args:
        x: float32 [B, K].
        w: blocks [N/64, K/64, 9, 64] of :func:`pallas_kernels.q4_layout.pack`, or a stack
            [L, N/64, K/64, 9, 64] with ``layer``.
        layer: int32 [1], the matrix of a stack to use. The stack is neither sliced nor copied.
        splits: K slices, a divisor of K/64; None takes :func:`default_splits`.
        after: an array that is not read, so that this call runs after the one that makes it.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    B, K = x.shape
    row_tiles, tiles, *block = w.shape[-4:]
    splits = default_splits(K) if splits is None else splits
    fits = tiles * TILE == K and tuple(block) == BLOCK and w.ndim == 4 + (layer is not None)
    if not fits or splits < 1 or tiles % splits:
        raise ValueError(f"x {x.shape}, w {w.shape} and {splits} splits do not fit each other")
    if B == 0:
        return jnp.zeros((splits, 0, row_tiles * TILE), jnp.float32)
    rows = 1 if B == 1 else min(B + B % 2, ROWS_A_BLOCK)
    blocks, steps, N = -(-B // rows), tiles // splits, row_tiles * TILE
    if blocks * rows > B:
        x = jnp.pad(x, ((0, blocks * rows - B), (0, 0)))
    operands = [x.reshape(blocks, rows, splits, steps * TILE), w]
    operands += [] if layer is None else [layer]

    def body(x: Any, w: Any, *refs: Any) -> None:
        _body(rows, steps, x, w if layer is None else w.at[refs[0][0]], *refs[-3:])

    parts = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, blocks * rows, N), jnp.float32),
        grid=(row_tiles, splits, blocks),
        grid_names=("tile", "split", "block"),
        scratch_types=[
            plgpu.SMEM((-(-rows // 2), steps, 128), jnp.int32),
            plgpu.SMEM((rows * WARPS,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*operands, *(() if after is None else (after,)))
    return parts[:, :B]


def _body(rows: int, steps: int, x: Any, w: Any, parts: Any, digits: Any, peaks: Any) -> None:
    tile, split, block = (lax.axis_index(name) for name in ("tile", "split", "block"))
    sharing = min(rows, 2)
    words, scales = [], []
    w = w.at[tile, pl.ds(split * steps, steps)]
    for p in range(steps):
        at = w.at[p]
        weights, halves = at.at[pl.ds(0, 8)].reshape(4, 128), at.at[pl.ds(8, 1)].reshape(4, 16)
        words.append(plgpu.load(weights, layout=WORDS, optimized=False))
        scales.append(plgpu.load(halves, layout=SCALES[sharing], optimized=False))
    # Without it the compiler puts these loads behind the wait for x.
    barrier()
    for r in range(rows):
        store_peak(x.at[block, r, split], peaks, r)
    barrier()
    for r in range(rows):
        store_digits(x.at[block, r, split], peaks, digits.at[r // 2], r, sharing)
    barrier()
    column = plgpu.broadcasted_iota(jnp.int32, (TILE, 8), 1, layout=ACC)
    for q in range(-(-rows // 2)):
        acc = plgpu.layout_cast(jnp.zeros((TILE, 8), jnp.float32), ACC)
        for p in range(steps):
            fragment = plgpu.load(digits.at[q, p], layout=DIGITS, optimized=False)
            acc = add_products(acc, words[p], fragment, scales[p], sharing)
        for r in range(sharing * q, sharing * (q + 1)):
            terms = acc * _digit_weights(peaks, r, column)
            if sharing == 2:
                terms = jnp.where((column < 4) == (r % 2 == 0), terms, 0.0)
            parts[split, block * rows + r, pl.ds(tile * TILE, TILE)] = terms.sum(1)


def _digit_weights(peaks: Any, r: int, column: jax.Array) -> jax.Array:
    """``2**(8·d + e - 34)`` of each column's digit, NaN where row r of x is not finite."""
    peak = functools.reduce(jnp.maximum, (peaks[WARPS * r + i] for i in range(WARPS)))
    e = jnp.maximum((peak >> 23) - (BIAS - 1), LOWEST)
    bits = ((column & 3) * 8 + (e + (BIAS - 34))) << 23
    bits |= jnp.where(peak >= _INF, _NAN, 0)
    return lax.bitcast_convert_type(bits, jnp.float32)
