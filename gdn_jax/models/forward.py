"""A model's tokens to logits: the only place where its blocks are composed."""

import itertools

import jax
import jax.numpy as jnp

from gdn_jax.layer import decode_step, prefill
from gdn_jax.models.attention import attend, rms_norm
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams, BlockParams, ModelCache, ModelParams
from gdn_jax.params import GDNParams
from gdn_jax.projection import project
from gdn_jax.state import GDNState
from gdn_jax.types import Array


def logits(
    params: ModelParams,
    cache: ModelCache,
    tokens: Array,
    cfg: ModelConfig,
    *,
    lengths: Array | None = None,
) -> tuple[Array, ModelCache]:
    """Logits of every token after those that the cache has, and the cache with them.

    One token of each row is a decode step, more are a prefill. Everything is float32; weights may
    be narrower.

    Args:
        params: the weights.
        cache: of these rows, with room for T more tokens.
        tokens: int32 [B, T].
        cfg: static.
        lengths: int32 [B]: how many tokens of a row count; those behind are padding.

    Returns:
        float32 [B, T, vocab], of no meaning for padding, and the new cache.
    """
    B, T = tokens.shape
    x = params.embedding[tokens].astype(jnp.float32)
    states, keys, values = cache.states, cache.k, cache.v
    linear, full = itertools.count(), itertools.count()
    for block in params.blocks:
        h = rms_norm(x, block.input_norm, cfg.norm_eps)
        if isinstance(block.mixer, AttentionParams):
            i = next(full)
            h, k, v = attend(block.mixer, h, keys[i], values[i], cache.length, cfg)
            keys, values = keys.at[i].set(k), values.at[i].set(v)
        else:
            h, states = _linear(block.mixer, states, next(linear), h, cfg, lengths)
        x = x + h
        x = x + _mlp(block, rms_norm(x, block.mlp_norm, cfg.norm_eps))
    head = params.embedding if params.head is None else params.head
    y = project(rms_norm(x, params.norm, cfg.norm_eps), head)
    length = cache.length + (jnp.full(B, T, jnp.int32) if lengths is None else lengths)
    return y, ModelCache(states, keys, values, length)


def _linear(
    params: GDNParams,
    states: GDNState,
    layer: int,
    x: Array,
    cfg: ModelConfig,
    lengths: Array | None,
) -> tuple[Array, GDNState]:
    own = jax.tree.map(lambda s: s[layer], states)
    if x.shape[1] == 1 and lengths is None:
        y, own = decode_step(params, own, x[:, 0], cfg.gdn)
        y = y[:, None]
    else:
        y, own = prefill(params, own, x, cfg.gdn, lengths=lengths)
    return y, jax.tree.map(lambda s, new: s.at[layer].set(new), states, own)


def _mlp(block: BlockParams, x: Array) -> Array:
    """SwiGLU: ``Wdown·(silu(Wgate·x) · Wup·x)``."""
    return project(
        jax.nn.silu(project(x, block.gate_proj)) * project(x, block.up_proj), block.down_proj
    )
