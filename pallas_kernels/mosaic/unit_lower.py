"""The inverse of a unit lower triangular [64, 64], in float32 where it could cancel.

The four diagonal blocks [16, 16] are inverted by forward substitution in float32, a column a thread
(see :func:`substituted`). Blocks are then joined two by two on the tensor cores: with X the inverse
of the blocks and L what is between two of them, ``X - X·L·X``.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, math, scf

from pallas_kernels.mosaic.mlir import (
    at,
    either,
    elements,
    f32,
    hold,
    i32,
    i32_type,
    less,
    sync,
    vector,
    zero,
)
from pallas_kernels.mosaic.tensor_cores import SQUARE, Product, products, split
from pallas_kernels.tuning import CHUNK

SIZE, BLOCK = CHUNK, 16
PAD = 8
"""Spare columns of the scratch, so that rows begin in different banks."""


def scratch() -> Any:
    """Shared memory for the diagonal blocks."""
    return plgpu.SMEM((SIZE, SIZE + PAD), jnp.float32)


def write_inverse(
    below: jax.Array,
    scratch: Any,
    inverse: Sequence[Any],
    link: Sequence[Any],
    interpreted: bool,
) -> None:
    """``inverse = (I + A)⁻¹`` in bfloat16 parts; what writes it also has to be waited for.

    Args:
        below: ``-A``, float32 [64, 64] in registers, zero on and above the diagonal.
        scratch: of :func:`scratch`.
        inverse, link: shared memory of bfloat16 [64, 64] for each part; ``link`` is overwritten.
            Copies that read them are waited for.
        interpreted: compute it in JAX.
    """
    parts, multiply = len(inverse), functools.partial(products, interpreted=interpreted)
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, (SIZE, SIZE), axis, layout=SQUARE) for axis in (0, 1)
    )

    def blocks(size: int) -> tuple[jax.Array, jax.Array]:
        return lax.div(row, size), lax.div(column, size)

    def put(refs: Sequence[Any], x: jax.Array) -> None:
        for ref, part in zip(refs, split(x, len(refs)), strict=True):
            ref[...] = part
        plgpu.commit_smem()
        sync(interpreted)

    x = _interpreted(below) if interpreted else _diagonal_blocks(below, scratch)
    x = jnp.where(operator.eq(*blocks(BLOCK)), x, 0.0)
    # Copies of what was in link and inverse.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    sync(interpreted)
    for size in (2 * BLOCK, 4 * BLOCK):
        # Below the diagonal, what joins two blocks and is in none of them.
        joining = operator.eq(*blocks(size)) & operator.ne(*blocks(size // 2))
        between = jnp.where(joining, below, 0.0)
        put(inverse, x)
        [joined] = multiply(Product(split(between, parts), inverse))
        put(link, joined)
        [x] = multiply(Product(split(x, parts), link, x))
    put(inverse, x)


def _interpreted(below: jax.Array) -> jax.Array:
    """The inverse of the diagonal blocks, and others beside them."""
    eye, places = jnp.eye(SIZE), jnp.arange(SIZE) // BLOCK
    blocks = jnp.where(places[:, None] == places[None], eye - below, 0)
    return lax.linalg.triangular_solve(blocks, eye, left_side=True, lower=True, unit_diagonal=True)


@plgpu.inline_mgpu(
    arg_types=(SQUARE, plgpu.RefType()),
    return_type=plgpu.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, layout=SQUARE),
)
def _diagonal_blocks(*arguments: Any) -> Any:
    """The inverse of the diagonal blocks; all other elements are undefined."""
    _, below, scratch = arguments
    inside = utils.memref_slice(scratch, (slice(0, SIZE), slice(0, SIZE)))
    below.store_untiled(inside, optimized=False)
    utils.warpgroup_barrier()
    thread = arith.remui(utils.thread_idx(), i32(2 * SIZE))
    # CTAs that share a multiprocessor take different pairs of its four schedulers.
    block = arith.index_cast(i32_type(), gpu.block_id(gpu.Dimension.x))
    column = arith.xori(thread, arith.muli(arith.andi(block, i32(1)), i32(SIZE)))
    mine = less(column, i32(SIZE))
    own = arith.remui(column, i32(BLOCK))
    first = arith.subi(column, own)
    block = at(scratch, arith.muli(first, i32(SIZE + PAD + 1)), f32())
    mine_at = utils.getelementptr(block, [own], f32())
    solved = either(mine, lambda: _solve(own, block), [zero()] * BLOCK)
    utils.warpgroup_barrier()
    branch = scf.IfOp(mine)
    with ir.InsertionPoint(branch.then_block):
        for j, x in enumerate(solved):
            place = utils.getelementptr(mine_at, [j * (SIZE + PAD)], f32())
            llvm.store(x, place)
        scf.yield_([])
    utils.warpgroup_barrier()
    return mosaic.FragmentedArray.load_untiled(inside, layout=mosaic.WGMMA_LAYOUT, optimized=False)


def _solve(own: Any, block: Any) -> list[Any]:
    """Column ``own`` of the inverse of the block at this address."""
    one = utils.c(1.0, f32())

    def four(i: int, j: int) -> list[Any]:
        place = utils.getelementptr(block, [i * (SIZE + PAD) + j], f32())
        return elements(llvm.load(vector(4, f32()), place, alignment=16))

    identity = [
        arith.select(arith.cmpi(arith.CmpIPredicate.eq, own, i32(i)), one, zero())
        for i in range(BLOCK)
    ]
    return substituted(identity, four, math.fma, hold)


def substituted(
    x: list[Any],
    four: Callable[[int, int], list[Any]],
    fma: Callable[[Any, Any, Any], Any],
    hold: Callable[[], None],
) -> list[Any]:
    """``(I + A)⁻¹·x`` of a block: ``x[i] -= A[i, j]·x[j]`` for j < i, four columns j at a time.

    Args:
        x: BLOCK numbers.
        four: ``-A[i, j : j + 4]`` of a row i.
        fma: ``a·b + c``.
        hold: called before each four columns are loaded.
    """
    x = list(x)
    for j in range(0, BLOCK, 4):
        hold()
        for i in range(j + 1, BLOCK):
            for n, a in enumerate(four(i, j)):
                if j + n < i:
                    x[i] = fma(a, x[j + n], x[i])
    return x
