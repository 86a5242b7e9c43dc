"""int4 weights times float32 rows on integer tensor cores, for Mosaic GPU.

A CTA of four warps takes some rows of x, some tiles of 64 rows of weights one after another, and
one K slice. Weights go from global memory straight to registers, the next chunk requested before
the present one is multiplied; the activations' digits, computed once while the first loads are on
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
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import jobs, tuning
from pallas_kernels.mosaic import q4_fragments
from pallas_kernels.mosaic.q4_fragments import Share
from pallas_kernels.q4_layout import BLOCK, TILE


def job(x: jax.Array, *weights: jax.Array, plan: tuning.Q4Plan | None = None) -> jobs.Job:
    """Each K slice's share of ``y = w·x``, for one or more matrices w.

    Matrices in one job share its instructions, and so its registers.

    Args:
        x: float32 [B, K], B at least 1.
        weights: blocks [N/64, K/64, 9, 64] of :func:`pallas_kernels.q4_layout.pack`, at least one.
        plan: how the work is divided; None takes :func:`pallas_kernels.tuning.q4_plan`.

    Returns:
        A job with an output float32 [splits, B, N] for every matrix.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    _check(x, *weights)
    B, row_tiles = x.shape[0], [w.shape[0] for w in weights]
    plan = plan or tuning.q4_plan(B, sum(row_tiles), weights[0].shape[1])
    share = _share(B, row_tiles, weights[0].shape[1], plan)
    rows, tiles, steps = share[:3]
    blocks = -(-B // rows)
    groups = [n // tiles for n in row_tiles]
    firsts = list(itertools.accumulate(groups[:-1], initial=0))

    def same(scalar: Any) -> jax.Array:
        return plgpu.layout_cast(
            jnp.broadcast_to(jnp.int32(scalar), (q4_fragments.THREADS,)), q4_fragments.SAME
        )

    def body(index: Any, x: Any, *refs: Any) -> None:
        ws, parts, (digits, factors) = refs[: len(groups)], refs[len(groups) : -2], refs[-2:]
        index, block = lax.div(index, blocks), lax.rem(index, blocks)
        group, split = lax.div(index, plan.splits), lax.rem(index, plan.splits)
        matrix = sum((group >= first).astype(jnp.int32) for first in firsts) - 1
        local = [jnp.clip(group - first, 0, n - 1) for first, n in zip(firsts, groups, strict=True)]
        mine = pl.ds(block * rows, min(rows, B))
        columns, slices = pl.ds(split * (steps * TILE), steps * TILE), pl.ds(split * steps, steps)
        views = [w.at[pl.ds(g * tiles, tiles), slices] for w, g in zip(ws, local, strict=True)]
        views += [
            y.at[split, mine, pl.ds(g * tiles * TILE, tiles * TILE)]
            for y, g in zip(parts, local, strict=True)
        ]
        have = same(jnp.minimum(B - block * rows, rows))
        q4_fragments.write_partial_sums(
            share, have, same(matrix), x.at[mine, columns], digits, factors, *views
        )

    pairs = -(-rows // 2)
    digits = plgpu.SMEM((pairs, steps, q4_fragments.THREADS), jnp.int32)
    return jobs.Job(
        ctas=sum(groups) * plan.splits * blocks,
        operands=(x, *weights),
        outs=tuple(
            jax.ShapeDtypeStruct((plan.splits, B, n * TILE), jnp.float32) for n in row_tiles
        ),
        body=body,
        scratch={
            f"q4_digits_{rows}_{steps}": digits,
            f"q4_factors_{rows}": plgpu.SMEM((4 * pairs,), jnp.float32),
        },
    )


def _share(B: int, row_tiles: list[int], steps: int, plan: tuning.Q4Plan) -> Share:
    mine = steps // plan.splits
    rows, tiles = min(B + B % 2 if B > 1 else 1, plan.rows), math.gcd(*row_tiles, plan.tiles)
    if steps % plan.splits or mine % plan.chunk or (rows > 1 and rows % 2):
        raise ValueError(f"{B} rows and {steps} blocks of columns cannot be divided as {plan}")
    return Share(rows, tiles, mine, plan.chunk, min(plan.ahead, mine // plan.chunk * tiles))


def _check(x: jax.Array, *weights: jax.Array) -> None:
    for w in weights:
        if x.ndim != 2 or w.ndim != 4 or w.shape[2:] != BLOCK or w.shape[1] * TILE != x.shape[1]:
            raise ValueError(f"x {x.shape} and w {w.shape} do not fit each other")


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
    plan: tuning.Q4Plan | None = None,
    after: jax.Array | None = None,
) -> jax.Array:
    """``y = w·x``: x float32 [B, K], w the blocks of weights [N, K] -> y float32 [B, N].

    XLA adds the K slices, in order of their columns, and may fuse the sum with what follows.
    Equal arguments give equal bits. A row of x that is not finite gives a row of NaN and touches no
    other.

    Args:
        x, w, plan, after: as for :func:`gemv_parts`; B may be 0.
    """
    _check(x, w)
    if x.shape[0] == 0:
        return jnp.zeros((0, w.shape[0] * TILE), jnp.float32)
    return functools.reduce(operator.add, gemv_parts(x, w, plan=plan, after=after))
