"""Small models of drawn weights, of sizes that int4 and the kernels can hold."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax as gdn
from gdn_jax.config import FULL, LINEAR
from gdn_jax.layer.params import LARGE
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams, BlockParams, ModelParams
from gdn_jax.verify.draw import draw_weights

MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *LARGE}

CFG = ModelConfig(
    gdn=gdn.GDNConfig(128, 1, 2, 64, 128),
    layer_types=(LINEAR, FULL, LINEAR),
    vocab_size=128,
    hidden_size=128,
    intermediate_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    rotary_dim=64,
    rope_theta=1e7,
    norm_eps=1e-6,
    tied=False,
)


def drawn(cfg: ModelConfig = CFG, seed: int = 0) -> ModelParams:
    """float32 weights; logits of unit size."""
    rng = np.random.default_rng(seed)
    D, F, V = cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size
    H, G, A = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim

    def normal(scale: float, *shape: int) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    def matrix(N: int, K: int) -> jax.Array:
        return normal(K**-0.5, N, K)

    def norm(N: int) -> jax.Array:
        return normal(0.2, N)

    def block(kind: str) -> BlockParams:
        if kind == LINEAR:
            small = draw_weights(cfg.gdn, int(rng.integers(2**31)))
            mixer = gdn.GDNParams(**{n: jnp.asarray(x) for n, x in small.items()})
        else:
            q, k, v = matrix(2 * H * A, D), matrix(G * A, D), matrix(G * A, D)
            mixer = AttentionParams(q, k, v, matrix(D, H * A), norm(A), norm(A))
        return BlockParams(norm(D), mixer, norm(D), matrix(F, D), matrix(F, D), matrix(D, F))

    embedding = normal(1.0, V, D)
    blocks = tuple(map(block, cfg.layer_types))
    return ModelParams(embedding, blocks, norm(D), None if cfg.tied else matrix(V, D))


def over_matrices(change: Any, params: ModelParams) -> ModelParams:
    """``change`` of every large matrix, the head among them."""

    def fields(x: Any) -> Any:
        found = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        changed = {n: change(w) for n, w in found.items() if n in MATRICES}
        if "mixer" in found:
            changed["mixer"] = fields(x.mixer)
        return dataclasses.replace(x, **changed)

    blocks = tuple(fields(block) for block in params.blocks)
    head = None if params.head is None else change(params.head)
    return dataclasses.replace(params, blocks=blocks, head=head)
