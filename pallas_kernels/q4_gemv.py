"""int4 weights times float32 rows on integer tensor cores, for Mosaic GPU.

A CTA of four warps takes some rows of x, some tiles of 64 rows of weights one after another, and
one K slice. Weights go from global memory straight to registers, the next chunk requested before
the present one is multiplied; the activations' digits, made once while the first loads are on
their way, lie in shared memory: 512 bytes a step of 64 columns for each two rows of x.

Digits. With ``m`` the largest magnitude of a row of x in the slice and ``2**(e-1) <= m < 2**e``,

    round(x · 2**(30 - e)) = sum_d digit_d · 256**d,   digit_d in -128..127,  d in 0..3

so x is exact to ``2**(e-31)``; e is at least -90. Nibbles stand in the high half of their byte,
which is 16 times the integer, so a product of two int8 is exact and int32 sums are too, also those
of two digits, ``2**19 + 2**27`` at most:

    y = sum_g scale_g · sum_j 2**(16·j + e - 34) · (16·integers · (digits_2j + 256·digits_2j+1))_g

The sums over a group's 32 columns are exact; those over groups are float32, in order of columns.

Columns of the m16n8k32 product: one row of x takes all eight, digit d of group 2·p in column d for
k < 16 and of group 2·p + 1 in column 4 + d for k >= 16 (low nibbles, then high ones). Two rows of
x take four columns each, and k runs over one group, low nibbles then high ones.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import jobs, q4_fragments, tuning
from pallas_kernels.q4_fragments import Share
from pallas_kernels.q4_layout import BLOCK, TILE, shape_reason


def unavailable_reason(N: int, K: int) -> str | None:
    """Why the kernel cannot multiply weights [N, K]; None when it can."""
    return shape_reason(N, K)


class _Grid(NamedTuple):
    """Sizes of a product, and what each CTA does of it."""

    B: int
    K: int
    N: int
    splits: int
    blocks: int
    share: Share

    @property
    def groups(self) -> int:
        """CTAs that divide the rows of weights among them."""
        return self.N // (TILE * self.share.tiles)

    def scratch(self) -> dict[str, Any]:
        """Digits of each two rows of x, and what a lane's sums are multiplied by."""
        share, pairs = self.share, -(-self.share.rows // 2)
        digits = plgpu.SMEM((pairs, share.steps, q4_fragments.THREADS), jnp.int32)
        return {
            f"q4_digits_{share.rows}_{share.steps}": digits,
            f"q4_factors_{share.rows}": plgpu.SMEM((4 * pairs,), jnp.float32),
        }

    def views(self, group: Any, split: Any, block: Any, x: Any, w: Any) -> tuple[Any, Any, Any]:
        """What a CTA reads: how many rows of x there are, those, and its weights."""
        rows, tiles, steps = self.share[:3]
        there = jnp.minimum(self.B - block * rows, rows)
        have = plgpu.layout_cast(
            jnp.broadcast_to(jnp.int32(there), (q4_fragments.THREADS,)), q4_fragments.SAME
        )
        x = x.at[self.rows_of(block), pl.ds(split * (steps * TILE), steps * TILE)]
        return have, x, w.at[pl.ds(group * tiles, tiles), pl.ds(split * steps, steps)]

    def rows_of(self, block: Any) -> Any:
        return pl.ds(block * self.share.rows, min(self.share.rows, self.B))

    def columns_of(self, group: Any) -> Any:
        size = self.share.tiles * TILE
        return pl.ds(group * size, size)


def _grid(x: jax.Array, w: jax.Array, plan: tuning.Q4Plan) -> _Grid:
    B, K = x.shape
    row_tiles, all_steps = w.shape[:2]
    steps = all_steps // plan.splits
    rows, tiles = min(B + B % 2 if B > 1 else 1, plan.rows), math.gcd(row_tiles, plan.tiles)
    if all_steps % plan.splits or steps % plan.chunk or (rows > 1 and rows % 2):
        raise ValueError(f"{B} rows and {all_steps} blocks of columns cannot be divided as {plan}")
    share = Share(rows, tiles, steps, plan.chunk, min(plan.ahead, steps // plan.chunk * tiles))
    return _Grid(B, K, row_tiles * TILE, plan.splits, -(-B // rows), share)


def _check(x: jax.Array, w: jax.Array) -> None:
    if x.ndim != 2 or w.ndim != 4 or w.shape[2:] != BLOCK or w.shape[1] * TILE != x.shape[1]:
        raise ValueError(f"x {x.shape} and w {w.shape} do not fit each other")


def job(x: jax.Array, w: jax.Array, *, plan: tuning.Q4Plan | None = None) -> jobs.Job:
    """Each K slice's share of ``y = w·x``, as a job with one output, float32 [splits, B, N].

    Args:
        x: float32 [B, K], B at least 1.
        w: blocks [N/64, K/64, 9, 64] of :func:`pallas_kernels.q4_layout.pack`.
        plan: how the work is divided; None takes :func:`pallas_kernels.tuning.q4_plan`.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    _check(x, w)
    grid = _grid(x, w, plan or tuning.q4_plan(x.shape[0], *w.shape[:2]))

    def body(index: Any, x: Any, w: Any, parts: Any, digits: Any, factors: Any) -> None:
        index, block = lax.div(index, grid.blocks), lax.rem(index, grid.blocks)
        group, split = lax.div(index, grid.splits), lax.rem(index, grid.splits)
        have, x, w = grid.views(group, split, block, x, w)
        parts = parts.at[split, grid.rows_of(block), grid.columns_of(group)]
        q4_fragments.write_partial_sums(grid.share, have, x, w, parts, digits, factors)

    return jobs.Job(
        ctas=grid.groups * grid.splits * grid.blocks,
        operands=(x, w),
        outs=(jax.ShapeDtypeStruct((grid.splits, grid.B, grid.N), jnp.float32),),
        body=body,
        scratch=grid.scratch(),
    )


@functools.partial(jax.jit, static_argnames="plan")
def gemv_parts(
    x: jax.Array,
    w: jax.Array,
    *,
    plan: tuning.Q4Plan | None = None,
    after: jax.Array | None = None,
) -> jax.Array:
    """The output of :func:`job` in a launch of its own, float32 [splits, B, N].

    ``after`` is an array that is not read, so that this call runs after the one that makes it.
    """
    [(parts,)] = jobs.launch([job(x, w, plan=plan)], name="q4_gemv_parts", after=after)
    return parts


@functools.partial(jax.jit, static_argnames="plan")
def gemv(
    x: jax.Array,
    w: jax.Array,
    *,
    residual: jax.Array | None = None,
    plan: tuning.Q4Plan | None = None,
    after: jax.Array | None = None,
) -> jax.Array:
    """``y = w·x + residual``: x float32 [B, K], w the blocks of weights [N, K] -> y float32 [B, N].

    XLA adds the K slices, in order of their columns and the residual last, and may fuse the sum
    with what follows. Equal arguments give equal bits. A row of x that is not finite gives a row
    of NaN and touches no other.

    Args:
        x, w, plan, after: as for :func:`gemv_parts`; B may be 0.
        residual: float32 [B, N].
    """
    _check(x, w)
    shape = x.shape[0], w.shape[0] * TILE
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual is {residual.shape}, needed {shape}")
    if shape[0] == 0:
        return jnp.zeros(shape, jnp.float32)
    y = functools.reduce(operator.add, gemv_parts(x, w, plan=plan, after=after))
    return y if residual is None else y + residual
