"""The middle kernel: steps 2 to 6 of a token in one launch; the state is read and written once.

Grid: one CTA of 128 threads for ``tile`` columns of one value head's S [K, V]; the V/tile CTAs of
a head are one cluster, because the norm of step 6 needs the whole head: each sends its sum of
squares to the others' shared memory. A tile of V needs no cluster.

Memory: S goes from global memory straight to registers and back, as in delta_rule. The partial
sums of the projections, a few kilobytes a CTA, come from the second-level cache and are added in
the order of their columns. q and k, normalised, pass through shared memory: they are computed with
one channel a thread and used with one row of S a thread.

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
from pallas_kernels.mosaic.mlir import sync
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
        S: a reference to float32 [L, N, HV, K, V]; the new state of the slot read is written.
        hist: a reference to float32 [L, N, W-1, C]; frame W-2 of the slot written is written.
        place: layer and slots of the rows.
        heads: heads and widths; K and V are 64 or 128.
        tile: columns of S a CTA owns, 32, 64 or 128 and at most V; below V it needs clusters.
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
    cta = _Cta(heads, tile, names, interpreted, *refs)
    if cta.tiles > 1:
        cluster.open_mailbox(cta.mailbox)
    at = Row.of(cta.place, cta.row)
    at.when_active(lambda: cta.advance(at))
    at.when_idle(cta.idle)


class _Split(NamedTuple):
    """Step 3: a CTA's channels of q [K], k [K] and v [tile], or a value for each of the three."""

    q: Any
    k: Any
    v: Any


class _Cta:
    """One CTA while it is traced: its row, its value head ``h``, and ``tile`` columns of S."""

    def __init__(
        self, heads: Heads, tile: int, names: tuple[str, ...], interpreted: bool, *refs: Any
    ) -> None:
        HK, HV, K, V, _ = heads
        self.heads, self.tile, self.interpreted = heads, tile, interpreted
        self.projected, self.small = Projected(*refs[:6]), Small(*refs[6:9])
        self.S, self.hist, *rest, self.keys_shared, self.values_shared, self.mailbox = refs[9:]
        self.place = tuple(rest[: -len(names)])
        self.outs = dict(zip(names, rest[-len(names) :], strict=True))
        self.tiles = V // tile
        i = lax.axis_index("head")
        self.j = lax.axis_index("tile") if self.tiles > 1 else 0
        self.row, self.h = lax.div(i, HV), lax.rem(i, HV)
        hk = lax.div(self.h, HV // HK)
        # The one CTA that writes what the value heads of a key head share.
        self.first = (lax.rem(self.h, HV // HK) == 0) & (self.j == 0)
        self.layout = columns(tile)
        self.per_row, self.per_column = self.layout.reduce(1), self.layout.reduce(0)
        self.mine = pl.ds(self.j * tile, tile)  # of V
        self.here = pl.ds(self.h * V + self.j * tile, tile)  # of HV·V
        self.keys = pl.ds(hk * K, K)  # of HK·K
        at_k, at_v = (HK + hk) * K, 2 * HK * K + self.h * V + self.j * tile
        self.at = _Split(self.keys, pl.ds(at_k, K), pl.ds(at_v, tile))  # of C

    def advance(self, at: Row) -> None:
        """Steps 2 to 6 of an active row."""
        S = load(self.S.at[at.layer, at.source, self.h, :, self.mine], self.layout)  # [K, tile]
        v_terms, z_slices = self._terms(self.at.v), self._slices(self.projected.z, self.here)
        weight = load(self.small.norm.at[self.mine], channels(self.tile))  # [tile]
        b, a = self._scalar(self.projected.b), self._scalar(self.projected.a)
        decay_rate, bias = self.small.A_log[self.h], self.small.dt_bias[self.h]
        # Without this the compiler moves these loads after the wait for those of q and k.
        sync(self.interpreted)
        x, convolved = self._convolve(v_terms)
        z = functools.reduce(jnp.add, z_slices)  # [tile]
        self._lay_down(convolved, weight, z)
        self._write_frame(at, x)
        beta, g = lax.logistic(b), -jnp.exp(decay_rate) * softplus(a + bias)
        writers = self.first, self.first, True
        for when, channel, *values in zip(writers, self.at, x, convolved, strict=True):
            self._keep(when, XC=(channel, values[0]), XCV=(channel, values[1]))
        self._keep(True, Z=(self.here, z))
        self._keep(self.j == 0, B=(self.h, b), A=(self.h, a), BETA=(self.h, beta), G=(self.h, g))
        q, k, v, gate = self._take_up()
        q, k = self._normalise(q, k)
        S = self._update(S, k, v, beta, g)
        # The state leaves while the output is still summed.
        self.S[at.layer, at.target, self.h, :, self.mine] = S
        o = jnp.sum(S * q, axis=0)  # [tile]
        self._keep(True, ON=(self.here, o))
        self._gated_norm(o, gate)

    def idle(self) -> None:
        """A row without a slot: write zeros, and wait until the cluster's barriers are set up."""
        zeros = plgpu.layout_cast(jnp.zeros((self.tile,), jnp.float32), self.per_column)
        self.outs["onn"][self.row, self.here] = zeros
        if self.tiles > 1:
            cluster.wait()

    def _slices(self, ref: Any, at: Any) -> list[jax.Array]:
        """The K slices of some columns of a projection, [at.size] each."""
        return [load(ref.at[s, self.row, at], channels(at.size)) for s in range(ref.shape[0])]

    def _scalar(self, ref: Any) -> jax.Array:
        """The head's column of b or a."""
        return functools.reduce(jnp.add, [ref[s, self.row, self.h] for s in range(ref.shape[0])])

    def _terms(self, at: Any) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """For some channels: the new frame's slices, the history's share, the newest tap."""
        layout, frame = channels(at.size), self._slices(self.projected.qkv, at)
        old = load(self.projected.pre.at[self.row, at], layout)  # [at.size]
        return frame, old, load(self.projected.newest.at[at], layout)

    def _convolve(self, v_terms: Any) -> tuple[_Split, _Split]:
        """Step 2: the new frame, which is the convolution's input, and its output."""
        terms = self._terms(self.at.q), self._terms(self.at.k), v_terms
        inputs, outputs = [], []
        for frame, old, tap in terms:
            inputs.append(functools.reduce(jnp.add, frame))
            outputs.append(silu(old + inputs[-1] * tap))
        return _Split(*inputs), _Split(*outputs)

    def _lay_down(self, convolved: _Split, weight: jax.Array, z: jax.Array) -> None:
        """Write q, k, v and step 6's gate to shared memory, one channel a thread."""
        self.keys_shared[0, :], self.keys_shared[1, :] = convolved.q, convolved.k
        self.values_shared[0, :], self.values_shared[1, :] = convolved.v, weight * silu(z)
        sync(self.interpreted)

    def _take_up(self) -> tuple[jax.Array, ...]:
        """Read q [K], k [K], v [tile] and the gate [tile] from shared memory, in S's layout."""
        q, k = (load(self.keys_shared.at[n], self.per_row) for n in range(2))
        v, gate = (load(self.values_shared.at[n], self.per_column) for n in range(2))
        return q, k, v, gate

    def _write_frame(self, at: Row, x: _Split) -> None:
        """The newest frame of the history, which holds the convolution's inputs."""
        last = self.hist.shape[2] - 1

        def write_keys() -> None:
            self.hist[at.layer, at.target, last, self.at.q] = x.q
            self.hist[at.layer, at.target, last, self.at.k] = x.k

        pl.when(self.first)(write_keys)
        self.hist[at.layer, at.target, last, self.at.v] = x.v

    def _normalise(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Step 4: both [K, tile], the same in every column."""
        q = q * (rsqrt(jnp.sum(q * q) + QK_NORM_EPS) * self.heads.K**-0.5)
        k = k * rsqrt(jnp.sum(k * k) + QK_NORM_EPS)
        self._keep(self.first, Q=(self.keys, q), K=(self.keys, k))
        return self._spread(q, 0), self._spread(k, 0)

    def _update(self, S: Any, k: Any, v: Any, beta: Any, g: Any) -> jax.Array:
        """Step 5 without the output: S [K, tile] after the token."""
        S = jnp.exp(g) * S
        delta = (v - jnp.sum(S * k, axis=0)) * beta  # [tile]
        return S + k * self._spread(delta, 1)

    def _spread(self, x: jax.Array, axis: int) -> jax.Array:
        """[K] along axis 0, or [tile] along axis 1 -> [K, tile]."""
        shape = self.heads.K, self.tile
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), self.layout)

    def _gated_norm(self, o: jax.Array, gate: jax.Array) -> None:
        """Step 6, whose mean is over the whole head."""
        square = jnp.sum(o * o)
        if self.tiles > 1:
            cluster.wait()
            square = cluster.total(square, self.mailbox, self.tiles)
        factor = rsqrt(square / self.heads.V + self.heads.eps)
        self.outs["onn"][self.row, self.here] = gate * (o * factor)

    def _keep(self, when: Any, **values: Any) -> None:
        """Read intermediates back where ``when`` holds: ``NAME=(index, value)``."""
        if len(self.outs) == 1:
            return

        def read_back() -> None:
            for name, (at, value) in values.items():
                self.outs[name][self.row, at] = value

        pl.when(when)(read_back)
