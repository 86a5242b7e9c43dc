"""Everything between the two projections in one launch: the state is read once and written once.

Grid: one CTA of 128 threads for ``tile`` columns of one value head's S [K, V]; the V/tile CTAs of
a head are one cluster, because the norm of step 6 needs the whole head: each sends its sum of
squares to the others' shared memory. A tile of V needs no cluster.

Memory: S goes from global memory straight to registers and back, as in delta_rule. The partial
sums of the projections, a few kilobytes a CTA, come from the second-level cache and are added in
the order of their columns. q and k, normalised, pass through shared memory: they are made with one
channel a thread and used with one row of S a thread.

One writer: history frames are moved by the launch before (see history); here the CTA of a key
head's first value head and first tile writes the new frame of its q and k channels, every CTA that
of its own v channels, and nobody reads history.

Order of sums: over K and V as in delta_rule, then over tiles in order; so bits depend on the sizes
and the tile alone.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.mosaic import cluster
from pallas_kernels.mosaic.layouts import channels, columns, load, rsqrt, silu, softplus
from pallas_kernels.mosaic.mlir import barrier
from pallas_kernels.place import Place, Row
from pallas_kernels.support import size_reason

QK_NORM_EPS = 1e-6


class Projected(NamedTuple):
    """What the first launch leaves: partial sums float32 [splits, B, rows]; ``pre`` [B, C] and
    ``newest`` [C] of :mod:`pallas_kernels.kernels.history`.
    """

    qkv: jax.Array
    z: jax.Array
    b: jax.Array
    a: jax.Array
    pre: jax.Array
    newest: jax.Array


class Small(NamedTuple):
    """The small tensors, float32: [HV], [HV], [V]."""

    A_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array


class Heads(NamedTuple):
    """Heads and widths, and the epsilon of step 6."""

    HK: int
    HV: int
    K: int
    V: int
    eps: float


READ_BACK = ("XC", "Z", "B", "A", "BETA", "G", "XCV", "Q", "K", "ON")
"""What ``trace`` reads out, named as in gdn_jax.Trace."""


def unavailable_reason(K: int | None, V: int | None) -> str | None:
    """Why the kernel cannot take heads [K, V]; None when it can, or might."""
    return size_reason("K", K, tuning.HEAD_DIMS) or size_reason("V", V, tuning.HEAD_DIMS)


def middle(
    projected: Projected,
    weights: Small,
    S: Any,
    hist: Any,
    place: Place,
    heads: Heads,
    *,
    tile: int,
    trace: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Steps 2 to 6 of one token for every row, without the history's share of step 2.

    An idle row reads and writes no state; its output is zero, and nothing of it is read back.

    Args:
        projected: of :mod:`pallas_kernels.kernels.history` and the projections.
        weights: the small tensors.
        S: a reference to float32 [L, N, HV, K, V]; the slot written becomes what the slot read was.
        hist: a reference to float32 [L, N, W-1, C]; frame W-2 of the slot written is written.
        place: layer and slots of the rows.
        heads: heads and widths; K and V are 64 or 128.
        tile: columns of S a CTA owns, a divisor of V from 16 up; below V it needs clusters.
        trace: also return the intermediates, without changing a bit of the rest.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU; tile must be V.

    Returns:
        onn [B, HV·V] float32, and the intermediates by name, empty without ``trace``.
    """
    B, tiles = projected.z.shape[1], heads.V // tile
    shapes = {"onn": (B, heads.HV * heads.V)}
    if trace:
        C, each, keys = projected.pre.shape[1], (B, heads.HV), (B, heads.HK * heads.K)
        values = shapes["onn"]
        every = ((B, C), values, *[each] * 4, (B, C), keys, keys, values)
        shapes |= dict(zip(READ_BACK, every, strict=True))
    kernel = plgpu.kernel(
        functools.partial(_body, heads, tile, tuple(shapes), interpret is not None),
        out_type=[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes.values()],
        grid=(B * heads.HV,),
        grid_names=("head",),
        cluster=(tiles,) if tiles > 1 else (),
        cluster_names=("tile",) if tiles > 1 else (),
        scratch_types=[
            plgpu.SMEM((2, heads.K), jnp.float32),
            plgpu.SMEM((2, tile), jnp.float32),
            cluster.scratch(tiles),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="gdn_middle",
    )
    outs = kernel(*projected, *weights, S, hist, *place.operands)
    named = dict(zip(shapes, outs, strict=True))
    return named.pop("onn"), named


def _body(heads: Heads, tile: int, names: tuple[str, ...], interpreted: bool, *refs: Any) -> None:
    HK, HV, K, V, eps = heads
    qkv, z, b_rows, a_rows, pre, newest, A_log, dt_bias, norm, S, hist = refs[:11]
    *rest, keys_there, values_there, mailbox = refs[11:]
    place, outs = rest[: -len(names)], dict(zip(names, rest[-len(names) :], strict=True))
    tiles, last = V // tile, hist.shape[2] - 1
    i = lax.axis_index("head")
    j = lax.axis_index("tile") if tiles > 1 else 0
    row, h = lax.div(i, HV), lax.rem(i, HV)
    hk, first = lax.div(h, HV // HK), (lax.rem(h, HV // HK) == 0) & (j == 0)
    layout = columns(tile)
    per_row, per_column = layout.reduce(1), layout.reduce(0)
    mine, here, keys = pl.ds(j * tile, tile), pl.ds(h * V + j * tile, tile), pl.ds(hk * K, K)
    at_q, at_k, at_v = keys, pl.ds((HK + hk) * K, K), pl.ds(2 * HK * K + h * V + j * tile, tile)
    if tiles > 1:
        cluster.open_mailbox(mailbox)

    def sync() -> None:
        if not interpreted:
            barrier()

    def parts(ref: Any, at: Any) -> list[jax.Array]:
        return [load(ref.at[s, row, at], channels(at.size)) for s in range(ref.shape[0])]

    def ends(at: Any) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        layout = channels(at.size)
        return parts(qkv, at), load(pre.at[row, at], layout), load(newest.at[at], layout)

    def convolve(parts: list[jax.Array], old: jax.Array, tap: jax.Array) -> tuple[Any, Any]:
        new = functools.reduce(jnp.add, parts)
        return new, silu(old + new * tap)

    def scalar(parts: Any) -> jax.Array:
        return functools.reduce(jnp.add, [parts[s, row, h] for s in range(parts.shape[0])])

    def keep(when: Any, **values: Any) -> None:
        """Read intermediates back: ``name=(index, value)``."""
        if len(outs) > 1:

            @pl.when(when)
            def _():
                for name, (at, value) in values.items():
                    outs[name][row, at] = value

    at = Row.of(tuple(place), row)

    @at.when_active
    def _():
        state = load(S.at[at.layer, at.source, h, :, mine], layout)
        ends_v, gates = ends(at_v), parts(z, here)
        weight = load(norm.at[mine], channels(tile))
        b, a, decay_rate, bias = scalar(b_rows), scalar(a_rows), A_log[h], dt_bias[h]
        # Without it the compiler puts these loads behind the wait for those of q and k.
        sync()
        ends_q, ends_k = ends(at_q), ends(at_k)
        (xq, q), (xk, k), (xv, v) = convolve(*ends_q), convolve(*ends_k), convolve(*ends_v)
        gate = functools.reduce(jnp.add, gates)
        keys_there[0, :], keys_there[1, :] = q, k
        values_there[0, :], values_there[1, :] = v, weight * silu(gate)
        sync()

        @pl.when(first)
        def _():
            hist[at.layer, at.target, last, at_q] = xq
            hist[at.layer, at.target, last, at_k] = xk

        hist[at.layer, at.target, last, at_v] = xv
        beta, g = lax.logistic(b), -jnp.exp(decay_rate) * softplus(a + bias)
        keep(first, XC=(at_q, xq), XCV=(at_q, q))
        keep(first, XC=(at_k, xk), XCV=(at_k, k))
        keep(True, XC=(at_v, xv), XCV=(at_v, v), Z=(here, gate))
        keep(j == 0, B=(h, b), A=(h, a), BETA=(h, beta), G=(h, g))

        def spread(x: jax.Array, axis: int) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(x, (K, tile), (axis,)), layout)

        q, k = (load(keys_there.at[n], per_row) for n in range(2))
        v, gate = (load(values_there.at[n], per_column) for n in range(2))
        q = q * (rsqrt(jnp.sum(q * q) + QK_NORM_EPS) * K**-0.5)
        k = k * rsqrt(jnp.sum(k * k) + QK_NORM_EPS)
        keep(first, Q=(keys, q), K=(keys, k))
        q, k = spread(q, 0), spread(k, 0)
        state = jnp.exp(g) * state
        delta = (v - jnp.sum(state * k, axis=0)) * beta
        state = state + k * spread(delta, 1)
        # The state leaves while the sums of the output are still made.
        S[at.layer, at.target, h, :, mine] = state
        o = jnp.sum(state * q, axis=0)
        keep(True, ON=(here, o))
        square = jnp.sum(o * o)
        if tiles > 1:
            cluster.wait()
            square = cluster.total(square, mailbox, tiles)
        outs["onn"][row, here] = gate * (o * rsqrt(square / V + eps))

    @at.when_idle
    def _():
        outs["onn"][row, here] = plgpu.layout_cast(jnp.zeros((tile,), jnp.float32), per_column)
        if tiles > 1:
            cluster.wait()
