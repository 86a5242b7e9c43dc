"""One token of one layer in three launches: input projections, middle, output projection.

What follows, XLA or a kernel, adds the partial sums of an int4 output projection in one pass with
its own work. That costs less than a sum inside this kernel did.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from pallas_kernels import tuning
from pallas_kernels.jobs import Job, launch
from pallas_kernels.kernels import float_gemv, history, q4_gemv
from pallas_kernels.kernels.middle import Heads, Projected, Small, middle
from pallas_kernels.place import Place, settled


class Weights(NamedTuple):
    """A layer's weights: float [N, K], or int32 blocks of :mod:`pallas_kernels.q4_layout`.

    qkv [C, D], z [HV·V, D], out [D, HV·V] are float or int4; b, a [HV, D], conv [C, W] float32.
    """

    qkv: jax.Array
    z: jax.Array
    b: jax.Array
    a: jax.Array
    conv: jax.Array
    small: Small
    out: jax.Array


def is_int4(w: jax.Array) -> bool:
    """Whether a weight is int4 blocks rather than a float matrix."""
    return w.ndim == 4


def projections(x: jax.Array, *weights: jax.Array) -> list[Job]:
    """Jobs of ``w·x`` for float or int4 weights, in order: partial sums float32 [splits, B, N]."""
    if all(map(is_int4, weights)):
        return [q4_gemv.job(x, *weights)]
    return [q4_gemv.job(x, w) if is_int4(w) else float_gemv.job(x, w) for w in weights]


@functools.partial(jax.jit, static_argnames=("heads", "trace", "clusters", "interpret"))
def step(
    weights: Weights,
    x: jax.Array,
    S: jax.Array,
    hist: jax.Array,
    place: Place,
    *,
    heads: Heads,
    trace: bool = False,
    clusters: bool = True,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Mapping[str, jax.Array]]:
    """The seven steps for every row of x; S and hist are updated in place where XLA may.

    An idle row reads and writes no state; its output is zero.

    Args:
        weights: of the layer.
        x: float32 [B, D].
        S, hist: float32 [L, N, HV, K, V] and [L, N, W-1, C], the states of a stack.
        place: the part of the stack, and the slots of the rows.
        heads: heads and widths.
        trace: also return the intermediates of the middle kernel, and ONN.
        clusters: whether the device has thread-block clusters, from compute capability 9.0 on.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU; float weights only.

    Returns:
        K slices of y, to be added in order, float32 [splits, B, D]; S, hist, and the intermediates
        by name.
    """
    states = jax.new_ref(S), jax.new_ref(hist)
    # The large jobs take a little less than one wave of CTAs; the small ones run in the rest of it.
    jobs = projections(x, weights.qkv, weights.z)
    splits, block = tuning.gate_slices(x.shape[1])
    jobs += [float_gemv.job(x, w, splits=splits, block=block) for w in (weights.b, weights.a)]
    jobs.append(history.job(states[1], weights.conv, place, len(x)))
    *large, (b,), (a,), ends = launch(jobs, name="gdn_input_projections", interpret=interpret)
    qkv, z = itertools.chain(*large)
    onn, seen = middle(
        Projected(qkv, z, b, a, *ends),
        weights.small,
        *states,
        place,
        heads,
        tile=tuning.middle_tile(len(x), heads.V, clusters),
        trace=trace,
        interpret=interpret,
    )
    if is_int4(weights.out):
        parts = q4_gemv.gemv_parts(onn, weights.out)
    else:
        parts = float_gemv.gemv(onn, weights.out, interpret=interpret)[None]
    S, hist = settled(*(state[...] for state in states))
    return parts, S, hist, ({**seen, "ONN": onn} if trace else {})
