"""A model's weights from a Hugging Face directory, tensor by tensor."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from gdn_jax.checkpoint import LINEAR, load_hf_layer
from gdn_jax.errors import CheckpointError
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams, BlockParams, ModelParams
from gdn_jax.tensor_files import TensorFiles
from gdn_jax.types import Array

_PREFIXES = ("model.language_model.", "model.")


def load_params(checkpoint_dir: str | os.PathLike[str], cfg: ModelConfig) -> ModelParams:
    """All weights in float32.

    Raises:
        CheckpointError: tensors missing or of another shape, or files that cannot be read.
    """
    files = TensorFiles.open(Path(checkpoint_dir))
    D, F = cfg.hidden_size, cfg.intermediate_size
    H, G, A = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in files.places), None)
    if prefix is None:
        raise CheckpointError(f"{files.source}: no tensor {_PREFIXES[1]}embed_tokens.weight")

    def read(name: str, *shape: int) -> Array:
        if name not in files.places:
            raise CheckpointError(f"{files.source}: no tensor {name}")
        return jnp.asarray(files.read_as(name, shape, np.dtype(np.float32)))

    def block(i: int, kind: str) -> BlockParams:
        own = f"{prefix}layers.{i}."
        if kind == LINEAR:
            mixer = load_hf_layer(checkpoint_dir, i)
        else:
            shapes = {"q_proj": (2 * H * A, D), "k_proj": (G * A, D), "v_proj": (G * A, D)}
            shapes |= {"o_proj": (D, H * A), "q_norm": (A,), "k_norm": (A,)}
            mixer = AttentionParams(
                **{n: read(f"{own}self_attn.{n}.weight", *s) for n, s in shapes.items()}
            )
        return BlockParams(
            read(f"{own}input_layernorm.weight", D),
            mixer,
            read(f"{own}post_attention_layernorm.weight", D),
            read(f"{own}mlp.gate_proj.weight", F, D),
            read(f"{own}mlp.up_proj.weight", F, D),
            read(f"{own}mlp.down_proj.weight", D, F),
        )

    return ModelParams(
        read(f"{prefix}embed_tokens.weight", cfg.vocab_size, D),
        tuple(block(i, kind) for i, kind in enumerate(cfg.layer_types)),
        read(f"{prefix}norm.weight", D),
        None if cfg.tied else read("lm_head.weight", cfg.vocab_size, D),
    )
