"""How the elements of an array lie over the 128 threads of a CTA, and loads in such a layout."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


def columns(tile: int) -> Any:
    """A [K, tile] array with tile/4 columns a warp, so that sums over K stay inside warps.

    A lane holds 4 neighbouring columns of every (512/tile)-th row. A layout must be written in
    its canonical form, which has no axis of length one.
    """
    rows = 512 // tile
    if rows == 32:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((32, 16), (32, 4))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, tile), (rows, tile // 4), (4,))),
        warp_dims=(-4,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def channels(width: int) -> Any:
    """A [width] array, width 32, 64 or 128: one element a thread, repeated over spare ones."""
    if width == 32:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((32,), (1,))),
            warp_dims=(plgpu.Replicated(4),),
            lane_dims=(-2,),
            vector_dim=-1,
        )
    warps = (-3,) if width == 128 else (-3, plgpu.Replicated(2))
    return plgpu.Layout.TILED(
        plgpu.Tiling(((width,), (32,), (1,))), warp_dims=warps, lane_dims=(-2,), vector_dim=-1
    )


def in_every_warp(width: int) -> Any:
    """A [width] array, a multiple of 32, that each warp has all of: neighbours in a lane."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((width,), (width // 32,))),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def taps_of(weight: Any, width: int) -> list[jax.Array]:
    """The columns of a reference [width, W], each in the layout of :func:`channels`.

    There are no strided loads: a thread loads its row and picks.
    """
    warps = (-4,) if width == 128 else (-4, plgpu.Replicated(2))
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((width, 1), (32, 1))), warp_dims=warps, lane_dims=(-2,), vector_dim=-1
    )
    rows = load(weight, layout)
    column = plgpu.broadcasted_iota(jnp.int32, rows.shape, 1, layout=layout)
    picked = (jnp.sum(jnp.where(column == j, rows, 0.0), axis=1) for j in range(rows.shape[1]))
    return [plgpu.layout_cast(tap, channels(width)) for tap in picked]


def load(ref: Any, layout: Any) -> jax.Array:
    """The elements of global or shared memory, straight into registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def as_computed(x: jax.Array) -> jax.Array:
    """``x`` as loaded, with the type that arithmetic gives inside of a kernel.

    Inside of ``jax.shard_map`` a load's type names the axes over which it varies; arithmetic in a
    kernel drops them, and a loop's carry needs one type. Two bitcasts then, which cost nothing;
    else ``x`` itself.
    """
    if not jax.typeof(x).manual_axis_type.varying:
        return x
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32), x.dtype)


def rsqrt(x: jax.Array) -> jax.Array:
    """``1/sqrt(x)`` with one Newton step: the hardware's own is 2 ulp off."""
    y = lax.rsqrt(x)
    return y * (1.5 - 0.5 * x * y * y)


def silu(x: jax.Array) -> jax.Array:
    """``x · sigmoid(x)``."""
    return x * lax.logistic(x)


def softplus(x: jax.Array) -> jax.Array:
    """``log(1 + exp(x)) = max(x, 0) + log1p(u)`` with ``u = exp(-|x|)`` and
    ``log1p(u) = 2·artanh(s)``, ``s = u/(2 + u) <= 1/3``, by its series: Mosaic has no log1p.
    """
    u = jnp.exp(-jnp.abs(x))
    s = u / (2.0 + u)
    square, series = s * s, jnp.zeros_like(s)
    for n in range(15, 0, -2):
        series = series * square + 1.0 / n
    return jnp.maximum(x, 0.0) + 2.0 * s * series
