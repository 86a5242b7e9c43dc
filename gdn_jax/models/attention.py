"""Gated full attention with rotary positions over a preallocated cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.models import kernels
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams
from gdn_jax.models.residual import Stream, added, rms_norm
from gdn_jax.models.route import Call, Route, products
from gdn_jax.types import Array

KeysValues = tuple[Array, Array]
"""Keys and values of a layer: its caches [B, G, N, A], or those of new tokens [B, T, G, A]."""


def rotate(x: Array, positions: Array, cfg: ModelConfig) -> Array:
    """Rotary embedding: the first R numbers of each head, as pairs (i, i + R/2), are turned.

    Pair i at position p by the angle ``p·theta^(-2i/R)``; x [B, T, H, A], positions int32 [B, T].
    """
    R = cfg.rotary_dim
    cos, sin = (part[:, :, None] for part in turn(positions, cfg))
    a, b, rest = jnp.split(x, (R // 2, R), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def turn(positions: Array, cfg: ModelConfig) -> tuple[Array, Array]:
    """cos and sin of :func:`rotate`'s angles, [B, T, R/2]."""
    R = cfg.rotary_dim
    frequencies = (cfg.rope_theta ** (-np.arange(0, R, 2) / R)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def attend(
    params: AttentionParams,
    caches: KeysValues,
    start: Array,
    h: Array,
    residual: Array,
    lengths: Array | None,
    call: Call,
) -> tuple[KeysValues, Stream]:
    """Tokens ``start`` to ``start + T - 1`` of each row attend to themselves and those before them.

    Returns the caches with the keys and values of these tokens written, and
    ``residual + Wo·(softmax(q·k / sqrt(A))·v · sigmoid(gate))``: h, residual [B, T, D].

    Args:
        params: the layer's weights.
        caches: both of one dtype, float32 or bfloat16, in which attention is computed.
        start: int32 [B], how many tokens of each row the caches hold.
        h: float32, after the block's norm.
        residual: float32.
        lengths: int32 [B], as for :func:`gdn_jax.models.forward.forward`.
        call: static.
    """
    B, T, _ = h.shape
    route, cfg = call.route, call.cfg
    positions = start[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    if T == 1 and route.backend == "pallas" and kernels.takes_heads(cfg):
        q, gate, caches = _token_on_kernels(params, h, caches, start, lengths, cfg)
        o = _step(q, *caches, positions, call.reach, route)
    else:
        q, gate, own = _projected(params, h, positions, caches[0].dtype, call)
        caches = _placed(caches, own, start, lengths)
        if T == 1:
            o = _step(q, *caches, positions, call.reach, route)
        elif call.fresh:
            o = _own(q, *own, route)
        else:
            o = _after(q, *caches, positions, call.reach, route)
    o = (o.astype(jnp.float32) * jax.nn.sigmoid(gate)).reshape(B, T, -1)
    return caches, added(o, params.o_proj, residual, route)


def _projected(
    params: AttentionParams, h: Array, positions: Array, dtype: Any, call: Call
) -> tuple[Array, Array, KeysValues]:
    """Queries and gates [B, T, H, A], and the tokens' keys and values.

    Gates are float32, all else is ``dtype``.
    """
    B, T, _ = h.shape
    cfg = call.cfg
    A, H, G = cfg.head_dim, cfg.num_attention_heads, cfg.num_key_value_heads
    q, k, v = products(h, params.q_proj, params.k_proj, params.v_proj, route=call.route)
    q, gate = jnp.split(q.reshape(B, T, H, 2 * A), 2, axis=-1)
    k, v = (new.reshape(B, T, G, A) for new in (k, v))
    q = rotate(rms_norm(q, params.q_norm, cfg.norm_eps), positions, cfg)
    k = rotate(rms_norm(k, params.k_norm, cfg.norm_eps), positions, cfg)
    q, k, v = (new.astype(dtype) for new in (q, k, v))
    return q, gate, (k, v)


def _token_on_kernels(
    params: AttentionParams,
    h: Array,
    caches: KeysValues,
    start: Array,
    lengths: Array | None,
    cfg: ModelConfig,
) -> tuple[Array, Array, KeysValues]:
    """Queries and gates of one token a row, and the caches with its keys and values."""
    at = jnp.where(start < caches[0].shape[2], start, -1)
    if lengths is not None:
        at = jnp.where(lengths > 0, at, -1)
    cos, sin = (part[:, 0] for part in turn(start[:, None], cfg))
    q, gate, caches = kernels.queries_and_caches(
        params, h[:, 0], (cos, sin), at, caches, cfg.norm_eps
    )
    return q[:, None], gate[:, None], caches


def _own(q: Array, k: Array, v: Array, route: Route) -> Array:
    """Attention of tokens with none before them: as many queries as keys, so masks are aligned."""
    return _attention(q, k, v, is_causal=True, implementation=route.attention)


def _after(
    q: Array, k: Array, v: Array, positions: Array, reach: int | None, route: Route
) -> Array:
    """Attention of tokens with others before them.

    cuDNN's causal mask begins at the first key, so a bias says which keys a token sees.
    """
    k, v = k[:, :, :reach], v[:, :, :reach]
    mask = _seen(positions, k.shape[2])
    if len(k) > 1:
        mask = jnp.repeat(mask, k.shape[1], axis=0)
    return _by_heads(q, k, v, mask=mask, implementation=route.attention)


def _step(q: Array, k: Array, v: Array, positions: Array, reach: int | None, route: Route) -> Array:
    """Attention of one token a row: cuDNN reads the row's own keys, XLA ``reach`` places."""
    if route.reads_by_length(len(q)):
        # An idle row whose cache is full would ask for one key more than the cache has.
        there = jnp.minimum(positions[:, 0] + 1, k.shape[2])
        there = jnp.repeat(there, k.shape[1])
        lengths = {"query_seq_lengths": jnp.ones_like(there), "key_value_seq_lengths": there}
        return _by_heads(q, k, v, **lengths, implementation="cudnn")
    return _after(q, k, v, positions, reach, dataclasses.replace(route, attention="xla"))


def _seen(positions: Array, keys: int) -> Array:
    """Which keys each token sees: bool [B, 1, T, keys]."""
    places = jnp.arange(keys, dtype=jnp.int32)
    return (places[None, None] <= positions[..., None])[:, None]


def _by_heads(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Attention of q [B, T, H, A] to caches [B, G, S, A], each key head as a row of its own.

    A row has H/G query heads. So the caches are not copied; only q and the output are transposed.
    """
    B, T, H, A = q.shape
    G, S = k.shape[1:3]
    q = jnp.moveaxis(q.reshape(B, T, G, H // G, A), 2, 1).reshape(B * G, T, H // G, A)
    k, v = (x.reshape(B * G, S, 1, A) for x in (k, v))
    o = _attention(q, k, v, **options).reshape(B, G, T, H // G, A)
    return jnp.moveaxis(o, 1, 2).reshape(B, T, H, A)


def _attention(q: Array, k: Array, v: Array, **options: Any) -> Array:
    # Otherwise a float32 dot may be TF32 on a GPU; the function itself relies on promotion.
    with jax.default_matmul_precision("float32"), jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, **options)


def _placed(caches: KeysValues, own: KeysValues, start: Array, lengths: Array | None) -> KeysValues:
    """The caches [B, G, N, A] with row b of ``own`` [B, T, G, A] written from ``start[b]`` on.

    Padding, and tokens beyond the room N, are not written.
    """
    B, T = own[0].shape[:2]
    t = jnp.arange(T, dtype=jnp.int32)[None]
    at = start[:, None] + t
    if lengths is not None:
        at = jnp.where(t < lengths[:, None], at, caches[0].shape[2] + t)
    rows = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, T))
    k, v = (
        cache.at[rows, :, at].set(new, mode="drop", unique_indices=True)
        for cache, new in zip(caches, own, strict=True)
    )
    return k, v
