"""The seven steps of one token, as seven pure functions in reading order.

Step 5, :func:`delta_rule`, is in :mod:`gdn_jax.ops.recurrence`, which the operators share.

Each step takes float32 arrays with leading batch axes and returns float32. Shapes are written
without the batch. The results of a step pass an optimization barrier, so that XLA fuses inside a
step and never across two: reading an intermediate out cannot change a bit of what follows it.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from gdn_jax.config import GDNConfig
from gdn_jax.layer.params import GDNParams
from gdn_jax.ops.gates import gates
from gdn_jax.ops.recurrence import delta_rule as delta_rule
from gdn_jax.ops.recurrence import l2_normalise, step
from gdn_jax.quant.project import Weight, project, rsqrt
from gdn_jax.types import Array


def cast(x: Array, dtype: DTypeLike) -> Array:
    """x in another dtype, rounded to it whatever comes before and after.

    XLA may leave out a rounding that is widened again, but not across these barriers.
    """
    if x.dtype == dtype:
        return x
    return lax.optimization_barrier(lax.optimization_barrier(x).astype(dtype))


@step
def input_projections(params: GDNParams, x: Array) -> tuple[Array, ...]:
    """Step 1: ``qkv, z, b, a, beta, g`` from x [D].

    ``qkv = Wqkv·x`` [C], ``z = Wz·x`` [HV·V], ``b = Wb·x``, ``a = Wa·x`` [HV], and beta and the
    log decay g [HV] from b and a by :func:`gdn_jax.ops.gates.gates`.
    """
    b, a = project(x, params.in_proj_b), project(x, params.in_proj_a)
    beta, g = gates(b, a, params.A_log, params.dt_bias)
    return project(x, params.in_proj_qkv), project(x, params.in_proj_z), b, a, beta, g


@step
def causal_conv(qkv: Array, hist: Array, weight: Array) -> tuple[Array, Array]:
    """Step 2: depthwise causal convolution, SiLU, and the new history.

    ``out[c] = silu(sum_j weight[c, j] · window[j, c])`` over the window ``[hist; qkv]``, oldest
    first. The history drops its oldest frame and appends the convolution's **input**.
    qkv [C], hist [W-1, C], weight [C, W] -> out [C], hist [W-1, C].
    """
    window = jnp.concatenate([hist, jnp.expand_dims(qkv, -2)], axis=-2)
    taps = lax.expand_dims(weight.T, range(window.ndim - 2))
    return jax.nn.silu(jnp.sum(window * taps, axis=-2)), window[..., 1:, :]


@step
def causal_conv_tokens(
    qkv: Array, hist: Array, weight: Array, lengths: Array | None
) -> tuple[Array, Array]:
    """Step 2 for T tokens at once: qkv [B, T, C], hist [B, W-1, C] -> out [B, T, C], hist.

    ``out[t] = silu(sum_j weight[:, j]·ext[t + j])`` with ``ext = [hist; qkv]``. The new history is
    the W-1 frames of ``ext`` before ``ext[lengths + W-1]``; ``lengths`` [B] is T where None.
    """
    T, W = qkv.shape[1], weight.shape[1]
    ext = jnp.concatenate([hist, qkv], axis=1)
    # One shifted product after another: windows side by side would be W times as large.
    total = functools.reduce(
        operator.add, (ext[:, j : j + T] * weight[None, None, :, j] for j in range(W))
    )
    if lengths is None:
        return jax.nn.silu(total), ext[:, T:]
    frames = jnp.asarray(lengths)[:, None] + jnp.arange(W - 1)[None]
    return jax.nn.silu(total), jnp.take_along_axis(ext, frames[..., None], axis=1)


@step
def split_heads(qkv: Array, cfg: GDNConfig) -> tuple[Array, Array, Array]:
    """Step 3: q [HK, K], k [HK, K], v [HV, V] as views of the convolved channels [C]."""
    q, k, v = jnp.split(qkv, (cfg.key_dim, 2 * cfg.key_dim), axis=-1)
    keys = (*qkv.shape[:-1], cfg.num_k_heads, cfg.head_k_dim)
    values = (*qkv.shape[:-1], cfg.num_v_heads, cfg.head_v_dim)
    return q.reshape(keys), k.reshape(keys), v.reshape(values)


@step
def normalise_qk(q: Array, k: Array) -> tuple[Array, Array]:
    """Step 4: both heads to unit length, then q scaled by ``K**-0.5``, once."""
    return l2_normalise(q) * q.shape[-1] ** -0.5, l2_normalise(k)


@step
def gated_rms_norm(o: Array, z: Array, weight: Array, eps: float) -> Array:
    """Step 6: ``weight · o·rsqrt(mean(o²) + eps) · silu(z)`` per value head.

    o [HV, V], z [HV·V], weight [V] (used as it is) -> [HV, V].
    """
    normed = o * rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps)
    return lax.expand_dims(weight, range(o.ndim - 1)) * normed * jax.nn.silu(z.reshape(o.shape))


@step
def output_projection(o: Array, weight: Weight) -> Array:
    """Step 7: ``y = Wout·o``, o [HV, V] -> y [D]."""
    return project(o.reshape(*o.shape[:-2], -1), weight)
