"""GGUF files written with the gguf package alone, head by head, for the tests of the reader."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import gdn_jax as gdn
from gdn_jax import GDNConfig
from gdn_jax.layer.params import LARGE
from gdn_jax.verify.draw import draw_weights
from tests.support.made_checkpoint import Arrays, fuse_ba, fuse_qkvz

Type = gguf.GGMLQuantizationType
TWICE = gdn.GDNConfig(64, 3, 6, 8, 32)
THRICE = gdn.GDNConfig(96, 2, 6, 16, 32)
EQUAL = gdn.GDNConfig(32, 2, 2, 8, 32)
NARROW = gdn.GDNConfig(64, 2, 6, 8, 16)
LAYER = 1
PROJECTIONS = ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_ba", "ssm_in", "ssm_out")
NUMPY = {Type.F32: np.float32, Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}


def tiled(x: np.ndarray, cfg: GDNConfig, width: int) -> np.ndarray:
    """Rows of value heads, from the order of safetensors to that of the file.

    The file goes once through all key heads with the first value head of each, then with the
    second one of each, and so on.
    """
    rows = []
    for member in range(cfg.heads_per_key):
        for key_head in range(cfg.num_k_heads):
            first = (key_head * cfg.heads_per_key + member) * width
            rows += [x[first + i] for i in range(width)]
    return np.stack(rows)


def layer_tensors(
    weights: Arrays, cfg: GDNConfig, architecture: str, fused: bool = False
) -> Arrays:
    """A layer's tensors in float32 by the name after ``blk.{i}.``."""
    w, V = weights, cfg.head_v_dim
    found = {
        "attn_qkv.weight": w["in_proj_qkv"],
        "attn_gate.weight": w["in_proj_z"],
        "ssm_beta.weight": w["in_proj_b"],
        "ssm_alpha.weight": w["in_proj_a"],
        "ssm_conv1d.weight": w["conv_weight"],
        "ssm_a": (-np.exp(w["A_log"].astype(np.float64))).astype(np.float32),
        "ssm_dt.bias": w["dt_bias"],
        "ssm_norm.weight": w["norm_weight"],
        "ssm_out.weight": w["out_proj"],
    }
    if architecture == "qwen3next":
        b, a = found.pop("ssm_beta.weight"), found.pop("ssm_alpha.weight")
        found["ssm_ba.weight"] = fuse_ba(b, a, cfg)
        if fused:
            qkv, z = found.pop("attn_qkv.weight"), found.pop("attn_gate.weight")
            found["ssm_in.weight"] = fuse_qkvz(qkv, z, cfg)
        return found
    keys = 2 * cfg.key_dim
    for name in ("attn_qkv.weight", "ssm_conv1d.weight"):
        x = found[name]
        found[name] = np.concatenate([x[:keys], tiled(x[keys:], cfg, V)])
    found["attn_gate.weight"] = tiled(found["attn_gate.weight"], cfg, V)
    for name in ("ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias"):
        found[name] = tiled(found[name], cfg, 1)
    found["ssm_out.weight"] = tiled(found["ssm_out.weight"].T, cfg, V).T
    return found


def metadata(cfg: GDNConfig, architecture: str) -> dict[str, Any]:
    """What the converter writes, by key, for a model of four layers."""
    return {
        f"{architecture}.{key}": value
        for key, value in {
            "block_count": 4,
            "embedding_length": cfg.d_model,
            "attention.layer_norm_rms_epsilon": cfg.norm_eps,
            "ssm.conv_kernel": cfg.conv_width,
            "ssm.state_size": cfg.head_k_dim,
            "ssm.group_count": cfg.num_k_heads,
            "ssm.time_step_rank": cfg.num_v_heads,
            "ssm.inner_size": cfg.num_v_heads * cfg.head_v_dim,
            "full_attention_interval": 4,
        }.items()
    }


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    architecture: str = "qwen35",
    *,
    projections: Type = Type.F32,
    raw: Mapping[str, tuple[np.ndarray, Type]] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """A file of these tensors, by full name, with the projections in a type; ``raw`` as bytes."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    for key, value in meta.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, x in tensors.items():
        if raw is not None and name in raw:
            continue
        kind = projections if name.split(".")[-2] in PROJECTIONS else Type.F32
        x = np.ascontiguousarray(x)
        if kind in (Type.F32, Type.F16):
            writer.add_tensor(name, x.astype(NUMPY[kind]))
        else:
            writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
    for name, (x, kind) in (raw or {}).items():
        writer.add_tensor(name, x, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_values(x: np.ndarray, kind: Type) -> np.ndarray:
    """What a type keeps of float32 values, decoded by the gguf package or cast by NumPy."""
    if kind in NUMPY:
        return x.astype(NUMPY[kind])
    return gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)


def block(tensors: Mapping[str, np.ndarray], layer: int = LAYER) -> Arrays:
    """A layer's tensors under their full names."""
    return {f"blk.{layer}.{name}": x for name, x in tensors.items()}


def made(
    path: Path,
    cfg: gdn.GDNConfig,
    architecture: str = "qwen35",
    fused: bool = False,
    **options: Any,
) -> Arrays:
    """A file of one layer; returns the layer's weights in the order of safetensors."""
    weights = draw_weights(cfg, seed=7)
    tensors = block(layer_tensors(weights, cfg, architecture, fused))
    write(path, tensors, metadata(cfg, architecture), architecture, **options)
    return weights


def to_params(weights: Mapping[str, Any]) -> gdn.GDNParams:
    """Weights on the device."""
    fields: dict[str, Any] = {
        name: x if isinstance(x, gdn.Q4Array) else jnp.asarray(x) for name, x in weights.items()
    }
    return gdn.GDNParams(**fields)


def drawn(cfg: gdn.GDNConfig, seed: int, kind: str) -> gdn.GDNParams:
    """Drawn weights; A_log has values near 0, of which many share a float32 -exp(A_log)."""
    weights: dict[str, Any] = draw_weights(cfg, seed)
    weights["A_log"][:2] = 1e-9, -3e-5
    dtypes = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32}
    for name in LARGE:
        x = weights[name]
        weights[name] = gdn.quantize_q4(x) if kind == "q4" else jnp.asarray(x, dtypes[kind])
    return to_params(weights)
