"""Tensor-core products of float32 values that are split into sums of bfloat16 parts.

One part is the value rounded to bfloat16; two or three parts keep 16 or 24 of its bits. A product
of two such sums leaves out the terms below its last part, so it takes 3 or 6 products of bfloat16,
summed in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SQUARE = plgpu.Layout.WGMMA
"""How a warpgroup holds a product [64·n, N]."""
BY_ROW, BY_COLUMN = SQUARE.reduce(1), SQUARE.reduce(0)
"""The layouts of one number a row, and of one a column."""


def shared(*shape: int) -> Any:
    """Shared memory of bfloat16 [.., m, n] as tensor cores and bulk copies want it."""
    swizzle = plgpu.find_swizzle(shape[-1] * 16)
    transforms = (
        plgpu.TilingTransform((8, swizzle // 2)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """``parts`` bfloat16 arrays, largest first; their sum is x up to the last one's rounding."""
    rounded = []
    for n in range(parts):
        rounded.append(x.astype(jnp.bfloat16))
        if n + 1 < parts:
            x = x - rounded[-1].astype(jnp.float32)
    return rounded


class Product(NamedTuple):
    """``start + a·b``: parts of a [m, k] in registers or shared memory, of b [k, n] in shared
    memory; float32 [m, n].
    """

    a: Sequence[Any]
    b: Sequence[Any]
    start: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """m and n."""
        return self.a[0].shape[0], self.b[0].shape[1]

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Parts to be multiplied, the smallest first."""
        a, b = self.a, self.b
        return [(x, y) for i, x in enumerate(a) for j, y in enumerate(b) if i + j < len(a)][::-1]


def products(
    *wanted: Product,
    beside: Callable[[], Any] = lambda: None,
    then: Sequence[Callable[[jax.Array, Any], Any]] | None = None,
    interpreted: bool,
) -> list[Any]:
    """Compute all of the products, issued together.

    Args:
        wanted: in the order in which they are waited for.
        beside: called after the products are issued and before the first is waited for.
        then: for each product, a function of it and of what ``beside`` returned, which runs while
            later products are still computed; by default it returns the product itself.
        interpreted: compute them in JAX.

    Returns:
        What each function of ``then`` returned.
    """
    then = then or [lambda total, _: total] * len(wanted)
    if interpreted:
        other = beside()
        return [use(_interpreted(p), other) for p, use in zip(wanted, then, strict=True)]

    def run(*sums: Any) -> list[Any]:
        for total, p in zip(sums, wanted, strict=True):
            if p.start is not None:
                total[...] = p.start
        for total, p in zip(sums, wanted, strict=True):
            for a, b in p.pairs:
                plgpu.wgmma(total, a, b)
        other, results = beside(), []
        for i, (total, use) in enumerate(zip(sums, then, strict=True)):
            later = sum(len(p.pairs) for p in wanted[i + 1 :])
            # The wait does not say which registers it is for.
            value = lax.optimization_barrier(plgpu.wgmma_accumulator_load(total, wait_n=later))
            results.append(use(value, other))
        return results

    return pl.run_scoped(run, *(plgpu.WGMMAAccumulatorRef(p.shape, jnp.float32) for p in wanted))


def _interpreted(p: Product) -> jax.Array:
    total = jnp.zeros(p.shape, jnp.float32) if p.start is None else p.start
    for a, b in p.pairs:
        a, b = (x[...].astype(jnp.float32) for x in (a, b))
        total = total + jnp.dot(a, b, precision=lax.Precision.HIGHEST)
    return total


def by_row(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """x broadcast so that all of row i is ``x[i]``."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (0,)), SQUARE)


def by_column(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """x broadcast so that all of column j is ``x[j]``."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (1,)), SQUARE)
