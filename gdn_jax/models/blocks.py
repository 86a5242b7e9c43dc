"""The parts of a model, each traceable by itself: embedding, the two kinds of block, head.

A block is ``x + mixer(norm(x))``, then ``x + mlp(norm(x))``. What it carries from token to token is
its first argument and its first result; for ``x`` see :mod:`gdn_jax.models.residual`.
"""

import jax
import jax.numpy as jnp

from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState
from gdn_jax.models.attention import KeysValues, attend
from gdn_jax.models.linear import advance
from gdn_jax.models.params import AttentionParams, BlockParams
from gdn_jax.models.residual import Stream, added, normed
from gdn_jax.models.route import Call, products
from gdn_jax.quant.project import Weight
from gdn_jax.types import Array


def embed(embedding: Array, tokens: Array) -> Array:
    """Rows of the embedding in float32: tokens [B, T] -> [B, T, D]."""
    return embedding[tokens].astype(jnp.float32)


def linear_block(
    states: GDNState,
    x: Stream,
    block: BlockParams,
    layer: int | Array,
    lengths: Array | None,
    call: Call,
) -> tuple[GDNState, Stream]:
    """A block with a Gated DeltaNet layer, whose state is ``layer`` of the stack of states."""
    assert isinstance(block.mixer, GDNParams)
    x, h = normed(x, block.input_norm, call.cfg.norm_eps)
    states, y = advance(block.mixer, states, layer, h, x, lengths, call)
    return states, _mlp(block, y, call)


def full_block(
    caches: KeysValues,
    x: Stream,
    block: BlockParams,
    start: Array,
    lengths: Array | None,
    call: Call,
) -> tuple[KeysValues, Stream]:
    """A block with full attention; its caches hold ``start`` int32 [B] tokens of each row."""
    assert isinstance(block.mixer, AttentionParams)
    x, h = normed(x, block.input_norm, call.cfg.norm_eps)
    caches, y = attend(block.mixer, caches, start, h, x, lengths, call)
    return caches, _mlp(block, y, call)


def _mlp(block: BlockParams, x: Stream, call: Call) -> Stream:
    """SwiGLU: ``x + Wdown·(silu(Wgate·h) · Wup·h)``."""
    x, h = normed(x, block.mlp_norm, call.cfg.norm_eps)
    # The gates are a prompt's largest arrays, and Wdown's operand is rounded to bfloat16 anyway.
    found = products(h, block.gate_proj, block.up_proj, route=call.route, rounded=True)
    gate, up = (y.astype(jnp.float32) for y in found)
    return added(jax.nn.silu(gate) * up, block.down_proj, x, call.route)


def head(norm: Array, weight: Weight, x: Stream, lengths: Array | None, call: Call) -> Array:
    """Logits float32 [B, T, vocab], or [B, vocab] of each row's last token."""
    if call.logits == "last" and isinstance(x, jax.Array) and x.shape[1] > 1:
        if lengths is None:
            x = x[:, -1:]
        else:
            at = jnp.maximum(lengths - 1, 0)[:, None, None]
            x = jnp.take_along_axis(x, at, axis=1)
    _, h = normed(x, norm, call.cfg.norm_eps)
    (y,) = products(h, weight, route=call.route)
    return y[:, 0] if call.logits == "last" else y
