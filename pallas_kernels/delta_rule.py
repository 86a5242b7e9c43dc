"""The gated delta rule of a few tokens in one launch: the state is read once and written once.

Grid: one CTA of 128 threads for ``tile`` columns of one value head's S [K, V], so
B · HV · V/tile of them, all independent: a column of S never meets another.

Memory: a CTA loads its [K, tile] columns straight into registers, 16 bytes a lane: tile/4 lanes
share a row, 128/tile rows make a warp's load, and the warps take turns over the rows. It keeps
them there for all T tokens and writes them back in place. Shared memory holds only the partial
sums of the four warps. q, k, v, g and beta come from the second-level cache.

Order of a sum over K: a thread's rows in two chains, its warp in a butterfly, the four warps as
(0 + 1) + (2 + 3). It depends on nothing but K and the tile, so results repeat bit for bit.

Offsets: indices are 32 bits wide, products of an index and a stride 64, so S may hold more than
2**31 elements. The grid has one axis: the others end at 65535.

Prediction for HV 48, K = V = 128 at 3681 GB/s and 1.9 µs a launch: 6.3 MB a sequence, so 3.6 µs
at B = 1, 15.6 at B = 8, 111 at B = 64. A tile of 32 takes 392 instructions a warp: 21 µs of
issue slots at B = 64, hidden behind the loads; 80 registers, so six CTAs and 96 KB of loads in
flight a multiprocessor.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning


def _layout(tile: int) -> Any:
    """A [K, tile] array over 4 warps of rows, each of 128/tile rows of tile/4 lanes of 4 columns.

    A layout must be written in its canonical form, which has no axis of length one.
    """
    rows = 128 // tile
    if rows == 1:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((4, tile), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4 * rows, tile), (rows, 4))),
        warp_dims=(-4,),
        lane_dims=(-2, -3),
        vector_dim=-1,
    )


def _body(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, S: Any, o: Any, *, tile: int
) -> None:
    T, HK, K = q.shape[1:]
    HV, V = v.shape[2:]
    tiles = V // tile
    i = lax.axis_index("tile")
    head = lax.div(i, tiles)
    b, h = lax.div(head, HV), lax.rem(head, HV)
    hk = lax.div(h, HV // HK)
    mine = pl.ds(lax.rem(i, tiles) * tile, tile)
    layout = _layout(tile)
    per_row, per_column = layout.reduce(1), layout.reduce(0)

    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def spread(x: jax.Array, axis: int) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (K, tile), (axis,)), layout)

    def token(t: Any, S: jax.Array) -> jax.Array:
        kt, qt = (spread(load(x.at[b, t, hk], per_row), 0) for x in (k, q))
        vt = load(v.at[b, t, h, mine], per_column)
        S = jnp.exp(g[b, t, h]) * S
        delta = (vt - jnp.sum(S * kt, axis=0)) * beta[b, t, h]
        S = S + kt * spread(delta, 1)
        o[b, t, h, mine] = jnp.sum(S * qt, axis=0) * scale[0]
        return S

    columns = S.at[b, h, :, mine]
    state = load(columns, layout)
    columns[...] = token(0, state) if T == 1 else lax.fori_loop(0, T, token, state)


@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def delta_rule_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: jax.Array,
    S: jax.Array,
    *,
    tile: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """``S ← exp(g)·S``; ``S ← S + k⊗((v - Sᵀk)·beta)``; ``o = scale·Sᵀq``, token by token.

    S is updated in place where the caller's jit may overwrite it (a donated argument, a loop's
    carry); elsewhere XLA copies it first.

    Args:
        q, k: [B, T, HK, K] float32, K 64 or 128.
        v: [B, T, HV, V] float32, HV a multiple of HK, V 64 or 128.
        g, beta: [B, T, HV] float32.
        scale: [] float32.
        S: [B, HV, K, V] float32.
        tile: columns of S a CTA owns, 16 to V; :func:`tuning.delta_rule_tile` by default.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.

    Returns:
        o [B, T, HV, V] and S [B, HV, K, V], float32.
    """
    B, _, HV, V = v.shape
    tile = tuning.delta_rule_tile(B * HV, V) if tile is None else tile
    kernel = plgpu.kernel(
        functools.partial(_body, tile=tile),
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        grid=(B * HV * (V // tile),),
        grid_names=("tile",),
        # A thread reads no element of S but those that it writes itself.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="delta_rule_decode",
    )
    state = jax.new_ref(S)
    o = kernel(q, k, v, g, beta, scale[None], state)
    return o, state[...]
