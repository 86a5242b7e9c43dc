"""The gated delta rule of a few tokens in one launch: the state is read once and written once.

Grid: one CTA of 128 threads for ``tile`` columns of one value head's S [K, V], so
B · HV · V/tile of them, all independent: a column of S never meets another.

Memory: a CTA loads its [K, tile] columns straight into registers, 16 bytes a lane, keeps them
there for all T tokens and writes them back in place. A warp owns tile/4 columns with all their
rows, so sums over K need no shared memory. q, k, v, g and beta come from the second-level cache.

Order of a sum over K: a lane's rows one after another, then its warp in a butterfly. It depends on
nothing but K and the tile, so results repeat bit for bit.

Offsets: indices are 32 bits wide, products of an index and a stride 64, so S may hold more than
2**31 elements. The grid has one axis: the others end at 65535.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.mosaic.layouts import columns, load
from pallas_kernels.mosaic.mlir import sync
from pallas_kernels.place import settled
from pallas_kernels.support import size_reason


def unavailable_reason(K: int | None, V: int | None, tokens: int | None) -> str | None:
    """Why the kernel cannot take heads [K, V] and so many tokens; None when it can, or might."""
    if tokens is not None and tokens > tuning.MAX_TOKENS:
        return f"T is {tokens}, the kernel takes at most {tuning.MAX_TOKENS} tokens"
    return size_reason("K", K, tuning.HEAD_DIMS) or size_reason("V", V, tuning.HEAD_DIMS)


def _body(
    interpreted: bool,
    tile: int,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any,
    S: Any,
    o: Any,
) -> None:
    T, HK, K = q.shape[1:]
    HV, V = v.shape[2:]
    tiles = V // tile
    i = lax.axis_index("tile")
    head = lax.div(i, tiles)
    b, h = lax.div(head, HV), lax.rem(head, HV)
    hk = lax.div(h, HV // HK)
    mine = pl.ds(lax.rem(i, tiles) * tile, tile)
    layout = columns(tile)
    per_row, per_column = layout.reduce(1), layout.reduce(0)

    def spread(x: jax.Array, axis: int) -> jax.Array:
        """[K] along axis 0, or [tile] along axis 1 -> [K, tile]."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (K, tile), (axis,)), layout)

    def fetch(t: Any) -> tuple[jax.Array, ...]:
        """q [K], k [K], v [tile], and the scalars g and beta."""
        keys = (load(x.at[b, t, hk], per_row) for x in (q, k))
        return *keys, load(v.at[b, t, h, mine], per_column), g[b, t, h], beta[b, t, h]

    def advance(S: jax.Array, operands: tuple[jax.Array, ...]) -> jax.Array:
        """S [K, tile] after a token."""
        _, k, v, g, beta = operands
        k = spread(k, 0)  # [K, tile]
        S = jnp.exp(g) * S
        delta = (v - jnp.sum(S * k, axis=0)) * beta  # [tile]
        return S + k * spread(delta, 1)

    def read(t: Any, S: jax.Array, q: jax.Array) -> None:
        o[b, t, h, mine] = jnp.sum(S * spread(q, 0), axis=0) * factor

    def token(t: Any, S: jax.Array) -> jax.Array:
        operands = fetch(t)
        S = advance(S, operands)
        read(t, S, operands[0])
        return S

    place, factor = S.at[b, h, :, mine], scale[0]
    state = load(place, layout)  # [K, tile]
    if T == 1:
        operands = fetch(0)
        # Without this the compiler moves some of these loads after the wait for others.
        sync(interpreted)
        state = advance(state, operands)
        # The state is written while the output is still summed.
        place[...] = state
        read(0, state, operands[0])
    else:
        place[...] = lax.fori_loop(0, T, token, state)


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
        tile: columns of S a CTA owns, 32 to V; :func:`tuning.delta_rule_tile` by default.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.

    Returns:
        o [B, T, HV, V] and S [B, HV, K, V], float32.
    """
    B, _, HV, V = v.shape
    tile = tuning.delta_rule_tile(B, V) if tile is None else tile
    kernel = plgpu.kernel(
        functools.partial(_body, interpret is not None, tile),
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        grid=(B * HV * (V // tile),),
        grid_names=("tile",),
        # A thread reads only those elements of S that it writes itself.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="delta_rule_decode",
    )

    # Not jax.new_ref, whose effect a custom_jvp around it may not have; for that, no vmap.
    def run(refs: Any) -> None:
        state, out = refs
        out[...] = kernel(q, k, v, g, beta, scale[None], state)

    S, o = pl.run_state(run)((S, jnp.zeros(v.shape, jnp.float32)))
    (S,) = settled(S)
    return o, S
