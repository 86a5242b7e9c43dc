"""Small directories and GGUF files of whole models, for the tests of loading."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams, ModelParams
from gdn_jax.verify.model.checks import BUNDLED
from tests.support.made_gguf import Type, tiled

TINY = BUNDLED
Tensors = dict[str, np.ndarray]

MIXERS = {
    "in_proj_qkv": "linear_attn.in_proj_qkv.weight",
    "in_proj_z": "linear_attn.in_proj_z.weight",
    "in_proj_b": "linear_attn.in_proj_b.weight",
    "in_proj_a": "linear_attn.in_proj_a.weight",
    "conv_weight": "linear_attn.conv1d.weight",
    "A_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "norm_weight": "linear_attn.norm.weight",
    "out_proj": "linear_attn.out_proj.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
BLOCKS = {
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}


def tiny_tensors() -> Tensors:
    """What transformers wrote."""
    return load_file(TINY / "model.safetensors")


def write_model(path: Path, tensors: Mapping[str, Any], shards: int = 1, **changes: Any) -> Path:
    """A directory of these tensors in one file or in shards; ``changes`` are of config.json."""
    path.mkdir(exist_ok=True)
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8")) | changes
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


def by_stored_name(params: ModelParams) -> dict[str, Any]:
    """Every weight of a model by its name in a Hugging Face file."""
    found: dict[str, Any] = {"model.embed_tokens.weight": params.embedding}
    found["model.norm.weight"] = params.norm
    if params.head is not None:
        found["lm_head.weight"] = params.head
    for i, block in enumerate(params.blocks):
        own = f"model.layers.{i}."
        found |= {own + theirs: getattr(block, ours) for ours, theirs in BLOCKS.items()}
        attention = isinstance(block.mixer, AttentionParams)
        for ours, theirs in MIXERS.items():
            if theirs.startswith("self_attn") == attention:
                found[own + theirs] = getattr(block.mixer, ours)
    return found


def wide_tensors(seed: int = 0) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of two layers in sizes that every GGUF type and the kernels take, and the config.

    Three value heads a key head: the order of GGUF files is not its own inverse.
    """
    config = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    D, F, HK, HV, K, V, H, G, A = 64, 256, 2, 6, 16, 32, 4, 2, 32
    C = 2 * HK * K + HV * V
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (128, D),
        "norm.weight": (D,),
        "layers.0.linear_attn.in_proj_qkv.weight": (C, D),
        "layers.0.linear_attn.in_proj_z.weight": (HV * V, D),
        "layers.0.linear_attn.in_proj_b.weight": (HV, D),
        "layers.0.linear_attn.in_proj_a.weight": (HV, D),
        "layers.0.linear_attn.conv1d.weight": (C, 1, 4),
        "layers.0.linear_attn.A_log": (HV,),
        "layers.0.linear_attn.dt_bias": (HV,),
        "layers.0.linear_attn.norm.weight": (V,),
        "layers.0.linear_attn.out_proj.weight": (D, HV * V),
        "layers.1.self_attn.q_proj.weight": (2 * H * A, D),
        "layers.1.self_attn.k_proj.weight": (G * A, D),
        "layers.1.self_attn.v_proj.weight": (G * A, D),
        "layers.1.self_attn.o_proj.weight": (D, H * A),
        "layers.1.self_attn.q_norm.weight": (A,),
        "layers.1.self_attn.k_norm.weight": (A,),
    }
    for i in range(2):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (D,),
            f"layers.{i}.post_attention_layernorm.weight": (D,),
            f"layers.{i}.mlp.gate_proj.weight": (F, D),
            f"layers.{i}.mlp.up_proj.weight": (F, D),
            f"layers.{i}.mlp.down_proj.weight": (D, F),
        }
    rng = np.random.default_rng(seed)
    tensors = {
        f"model.{name}": (0.3 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    tensors["lm_head.weight"] = rng.standard_normal((128, D)).astype(np.float32)
    return tensors, config


def gguf_tensors(tensors: Tensors, cfg: ModelConfig) -> Tensors:
    """The tensors as the converter of llama.cpp stores them; names by the gguf package."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, len(cfg.layer_types))
    found = {}
    for name, x in tensors.items():
        part, x = name.rpartition("linear_attn.")[2], x.astype(np.float32)
        stem, suffix = name.removesuffix(".weight"), ".weight"
        if part == "A_log":
            x, suffix = -np.exp(x), ""
        if part == "dt_bias":
            stem, suffix = name.replace("dt_bias", "dt_proj"), ".bias"
        if name.endswith("norm.weight") and part != "norm.weight":
            x = x + np.float32(1)
        if part == "conv1d.weight":
            x = x[:, 0]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            keys = 2 * cfg.gdn.key_dim
            x = np.concatenate([x[:keys], tiled(x[keys:], cfg.gdn, cfg.gdn.head_v_dim)])
        if part == "in_proj_z.weight":
            x = tiled(x, cfg.gdn, cfg.gdn.head_v_dim)
        if part in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
            x = tiled(x, cfg.gdn, 1)
        if part == "out_proj.weight":
            x = tiled(x.T, cfg.gdn, cfg.gdn.head_v_dim).T
        found[f"{names.get_name(stem)}{suffix}"] = np.ascontiguousarray(x)
    return found


def gguf_metadata(cfg: ModelConfig) -> dict[str, Any]:
    """What the converter writes of the sizes, by key."""
    full = [i + 1 for i in cfg.full_layers]
    found = {
        "block_count": len(cfg.layer_types),
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": cfg.intermediate_size,
        "attention.head_count": cfg.num_attention_heads,
        "attention.head_count_kv": cfg.num_key_value_heads,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "attention.layer_norm_rms_epsilon": cfg.norm_eps,
        "rope.dimension_count": cfg.rotary_dim,
        "rope.freq_base": cfg.rope_theta,
        "ssm.conv_kernel": cfg.gdn.conv_width,
        "ssm.state_size": cfg.gdn.head_k_dim,
        "ssm.group_count": cfg.gdn.num_k_heads,
        "ssm.time_step_rank": cfg.gdn.num_v_heads,
        "ssm.inner_size": cfg.gdn.value_dim,
        "full_attention_interval": full[0],
    }
    return {f"qwen35.{key}": value for key, value in found.items()}


def stored_as(x: np.ndarray, kind: Type) -> tuple[np.ndarray, Type]:
    """A tensor's bytes in a type, for ``write(raw=...)``."""
    return gguf.quants.quantize(np.ascontiguousarray(x), kind), kind


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, by JAX."""
    return np.asarray(jnp.asarray(x, jnp.bfloat16))
