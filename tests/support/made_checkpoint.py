"""Hugging Face directories of drawn weights, at sizes that int4 can hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gdn_jax import GDNConfig
from gdn_jax.verify.draw import draw_weights

Arrays = dict[str, np.ndarray]

STORED = {
    "in_proj_qkv": "in_proj_qkv.weight",
    "in_proj_z": "in_proj_z.weight",
    "in_proj_b": "in_proj_b.weight",
    "in_proj_a": "in_proj_a.weight",
    "conv_weight": "conv1d.weight",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm_weight": "norm.weight",
    "out_proj": "out_proj.weight",
}


def fuse_qkvz(qkv: np.ndarray, z: np.ndarray, cfg: GDNConfig) -> np.ndarray:
    """The rows of q, k, v and z, key head by key head."""
    K, V, r = cfg.head_k_dim, cfg.head_v_dim, cfg.heads_per_key
    rows = []
    for h in range(cfg.num_k_heads):
        rows += [qkv[h * K + i] for i in range(K)]
        rows += [qkv[cfg.key_dim + h * K + i] for i in range(K)]
        rows += [qkv[2 * cfg.key_dim + h * r * V + i] for i in range(r * V)]
        rows += [z[h * r * V + i] for i in range(r * V)]
    return np.stack(rows)


def fuse_ba(b: np.ndarray, a: np.ndarray, cfg: GDNConfig) -> np.ndarray:
    """The rows of b and a, key head by key head, b first."""
    r, rows = cfg.heads_per_key, []
    for h in range(cfg.num_k_heads):
        rows += [b[h * r + i] for i in range(r)] + [a[h * r + i] for i in range(r)]
    return np.stack(rows)


def stored_layer(weights: Arrays, cfg: GDNConfig, architecture: str) -> Arrays:
    """The tensors of a layer by their names after the prefix."""
    tensors = {STORED[name]: x for name, x in weights.items()}
    tensors["conv1d.weight"] = tensors["conv1d.weight"][:, None]
    if architecture == "qwen3_next":
        qkv, z = (tensors.pop(f"in_proj_{part}.weight") for part in ("qkv", "z"))
        b, a = (tensors.pop(f"in_proj_{part}.weight") for part in ("b", "a"))
        tensors["in_proj_qkvz.weight"] = fuse_qkvz(qkv, z, cfg)
        tensors["in_proj_ba.weight"] = fuse_ba(b, a, cfg)
    return tensors


def write_config(path: Path, cfg: GDNConfig, architecture: str, **more: Any) -> None:
    """config.json of four layers, the last one full attention."""
    config = {
        "model_type": {"qwen3_5": "qwen3_5_text"}.get(architecture, architecture),
        "hidden_size": cfg.d_model,
        "linear_num_key_heads": cfg.num_k_heads,
        "linear_num_value_heads": cfg.num_v_heads,
        "linear_key_head_dim": cfg.head_k_dim,
        "linear_value_head_dim": cfg.head_v_dim,
        "linear_conv_kernel_dim": cfg.conv_width,
        "rms_norm_eps": cfg.norm_eps,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
    }
    (path / "config.json").write_text(json.dumps(config | more), encoding="utf-8")


def write_layers(path: Path, layers: Mapping[int, Arrays]) -> None:
    """model.safetensors of tensors by name, layer by layer."""
    tensors = {
        f"model.layers.{i}.linear_attn.{name}": np.ascontiguousarray(x)
        for i, layer in layers.items()
        for name, x in layer.items()
    }
    save_file(tensors, path / "model.safetensors")


def make_checkpoint(path: Path, cfg: GDNConfig, architecture: str) -> dict[int, Arrays]:
    """A directory of three linear layers; returns their weights by field."""
    layers = {i: draw_weights(cfg, seed=i) for i in range(3)}
    path.mkdir()
    write_config(path, cfg, architecture)
    write_layers(path, {i: stored_layer(x, cfg, architecture) for i, x in layers.items()})
    return layers
