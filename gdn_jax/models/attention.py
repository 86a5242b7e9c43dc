"""Gated full attention with rotary positions over a preallocated cache."""

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams
from gdn_jax.projection import project, rsqrt
from gdn_jax.types import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``(1 + w) · x · rsqrt(mean(x²) + eps)`` over the last axis."""
    normed = x * rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed * lax.expand_dims(1.0 + weight, range(x.ndim - 1))


def rotate(x: Array, positions: Array, cfg: ModelConfig) -> Array:
    """x [B, T, H, A] with its first R numbers turned: pairs (i, i + R/2) by ``p·theta^(-2i/R)``.

    positions int32 [B, T].
    """
    R = cfg.rotary_dim
    frequencies = cfg.rope_theta ** (-jnp.arange(0, R, 2, dtype=jnp.float32) / R)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b, rest = jnp.split(x, (R // 2, R), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attend(
    params: AttentionParams,
    x: Array,
    k_cache: Array,
    v_cache: Array,
    start: Array,
    cfg: ModelConfig,
) -> tuple[Array, Array, Array]:
    """Tokens ``start`` to ``start + T - 1`` of each row, after all that the cache has of it.

    ``softmax(q·k / sqrt(A))·v · sigmoid(gate)``, projected: x [B, T, D] -> [B, T, D], and the
    caches [B, N, G, A] with the tokens' keys and values in their places. start int32 [B].
    """
    B, T, _ = x.shape
    A, H, G = cfg.head_dim, cfg.num_attention_heads, cfg.num_key_value_heads
    q, gate = jnp.split(project(x, params.q_proj).reshape(B, T, H, 2 * A), 2, axis=-1)
    k, v = (project(x, w).reshape(B, T, G, A) for w in (params.k_proj, params.v_proj))
    positions = start[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    q = rotate(rms_norm(q, params.q_norm, cfg.norm_eps), positions, cfg)
    k = rotate(rms_norm(k, params.k_norm, cfg.norm_eps), positions, cfg)
    k_cache, v_cache = (_placed(c, new, start) for c, new in ((k_cache, k), (v_cache, v)))
    places = jnp.arange(k_cache.shape[1], dtype=jnp.int32)
    seen = places[None, None] <= positions[..., None]
    o = jax.nn.dot_product_attention(q, k_cache, v_cache, mask=seen[:, None])
    o = o * jax.nn.sigmoid(gate)
    return project(o.reshape(B, T, H * A), params.o_proj), k_cache, v_cache


def _placed(cache: Array, new: Array, start: Array) -> Array:
    """Row b of ``new`` [B, T, G, A] at ``start[b]`` of the cache."""

    def row(cache: Array, new: Array, start: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(cache, new, start, axis=0)

    return jax.vmap(row)(cache, new, start)
