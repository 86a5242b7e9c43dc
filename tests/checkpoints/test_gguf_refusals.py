"""GGUF files that are refused, each with one clear line, and writes that leave no trace."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.verify.draw import draw_weights
from tests.support.made_gguf import (
    EQUAL,
    LAYER,
    NARROW,
    TWICE,
    Type,
    block,
    drawn,
    layer_tensors,
    made,
    metadata,
    write,
)
from tests.support.tools import assert_close, assert_refused, assert_same_bits


def refused(path: Path, *fragments: str, layer: Any = LAYER) -> None:
    assert_refused(
        lambda: gdn.load_gguf_layer(path, layer), str(path), *fragments, error=gdn.CheckpointError
    )


def test_what_is_no_gguf_file_is_refused(tmp_path: Path):
    refused(tmp_path / "absent.gguf", "no such file")
    refused(tmp_path, "not a GGUF file")
    path = tmp_path / "f.gguf"
    for content in (b"", b"GGUF", b"safetensors? " * 9):
        path.write_bytes(content)
        refused(path, "truncated or not a GGUF file")


def test_files_cut_anywhere_are_refused(tmp_path: Path):
    path = tmp_path / "f.gguf"
    made(path, EQUAL)
    whole = path.read_bytes()
    header = whole.index(b"ssm_out.weight") + 64
    for size in (*range(0, header, 7), (header + len(whole)) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        refused(path, "truncated or not a GGUF file")


def test_big_endian_and_split_files_are_refused(tmp_path: Path):
    path = tmp_path / "f.gguf"
    made(path, EQUAL, endianess=gguf.GGUFEndian.BIG)
    refused(path, "big-endian")
    write(path, {}, metadata(EQUAL, "qwen35") | {"split.count": 3})
    refused(path, "one of 3 parts of a split file", "gguf-split --merge")


def test_other_architectures_are_refused(tmp_path: Path):
    write(tmp_path / "f.gguf", {}, metadata(EQUAL, "mamba2"), "mamba2")
    refused(tmp_path / "f.gguf", "architecture is 'mamba2'", "needed one of qwen35, qwen35moe")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("ssm.state_size", None, "no metadata qwen35.ssm.state_size"),
        ("attention.layer_norm_rms_epsilon", None, "no metadata qwen35.attention.layer_norm"),
        ("attention.layer_norm_rms_epsilon", 0.0, "norm_eps is 0.0"),
        ("ssm.inner_size", 65, "qwen35.ssm.inner_size is 65; needed a multiple of the 2"),
        ("ssm.group_count", 3, "num_v_heads is 2; needed a multiple of num_k_heads = 3"),
        ("ssm.conv_kernel", 1, "conv_width is 1"),
        ("ssm.conv_kernel", 4.0, "qwen35.ssm.conv_kernel is 4.0; needed an integer, 1 or more"),
        ("embedding_length", 0, "qwen35.embedding_length is 0; needed"),
        ("block_count", "four", "qwen35.block_count is 'four'; needed"),
        ("full_attention_interval", 0, "qwen35.full_attention_interval is 0; needed"),
        ("attention.recurrent_layers", [True], "recurrent_layers is [True]; needed 4 booleans"),
        ("attention.recurrent_layers", 1, "recurrent_layers is 1; needed 4 booleans"),
    ],
)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: Any, said: str):
    meta = metadata(EQUAL, "qwen35") | {f"qwen35.{key}": value}
    write(tmp_path / "f.gguf", {}, {k: v for k, v in meta.items() if v is not None})
    refused(tmp_path / "f.gguf", said)


@pytest.mark.parametrize("layer", [-1, 4, True, 1.0, "1"])
def test_layers_out_of_range_are_refused(tmp_path: Path, layer: Any):
    made(tmp_path / "f.gguf", EQUAL)
    refused(tmp_path / "f.gguf", f"layer is {layer!r}; needed 0 to 3", layer=layer)


def test_layers_that_are_not_there_are_refused(tmp_path: Path):
    made(tmp_path / "f.gguf", EQUAL)
    refused(tmp_path / "f.gguf", "layer 3 is a full_attention layer", "0, 1, 2", layer=3)
    refused(tmp_path / "f.gguf", "no tensor under blk.2.ssm_", "holds the layers 1", layer=2)


@pytest.mark.parametrize("name", layer_tensors(draw_weights(EQUAL, 0), EQUAL, "qwen35"))
def test_missing_and_misshapen_tensors_are_refused(tmp_path: Path, name: str):
    path, full = tmp_path / "f.gguf", f"blk.{LAYER}.{name}"
    tensors = block(layer_tensors(draw_weights(TWICE, 1), TWICE, "qwen35"))
    meta = metadata(TWICE, "qwen35")
    x = tensors[full]
    wrong = x[:-1] if x.ndim == 1 else x.T
    write(path, tensors | {full: wrong}, meta)
    refused(path, full, f"has shape {list(wrong.shape)}; needed {list(x.shape)}")
    del tensors[full]
    write(path, tensors, meta)
    refused(path, f"no tensor {full}")


@pytest.mark.parametrize("extra", ["attn_qkv.scale", "attn_gate.bias", "ssm_in.weight", "ssm_d"])
def test_tensors_that_are_not_understood_are_refused(tmp_path: Path, extra: str):
    path, full = tmp_path / "f.gguf", f"blk.{LAYER}.{extra}"
    tensors = block(layer_tensors(draw_weights(EQUAL, 1), EQUAL, "qwen35"))
    others = {f"blk.{LAYER}.attn_norm.weight": np.ones(32, np.float32)}
    write(path, tensors | others, metadata(EQUAL, "qwen35"))
    gdn.load_gguf_layer(path, LAYER)
    write(path, tensors | {full: np.ones(32, np.float32)}, metadata(EQUAL, "qwen35"))
    refused(path, f"unexpected tensor {full}")


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q5_0, Type.Q4_K, Type.Q6_K, Type.F64])
@pytest.mark.parametrize("name", ["attn_qkv.weight", "ssm_alpha.weight"])
def test_types_that_are_not_exact_are_refused(tmp_path: Path, name: str, kind: Type):
    cfg = gdn.GDNConfig(256, 1, 1, 8, 32)
    full = f"blk.{LAYER}.{name}"
    tensors = block(layer_tensors(draw_weights(cfg, 1), cfg, "qwen35"))
    width, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.zeros((len(tensors[full]), 256 // width * size), np.uint8)
    path = write(tmp_path / "f.gguf", tensors, metadata(cfg, "qwen35"), raw={full: (stored, kind)})
    refused(path, f"{full} is {kind.name}, which", "Q8_0, F16", "`gdn-jax quantize`")


def test_int4_heads_that_a_group_does_not_fit_are_refused(tmp_path: Path):
    path = tmp_path / "f.gguf"
    made(path, NARROW, projections=Type.Q4_0)
    refused(path, f"blk.{LAYER}.ssm_out.weight is Q4_0", "16 columns", "multiple of 32", "Q8_0")
    weights = made(path, NARROW, projections=Type.Q8_0)
    loaded = gdn.load_gguf_layer(path, LAYER).out_proj
    assert_close(loaded, weights["out_proj"], 1e-2)
    made(path, NARROW, "qwen3next", projections=Type.Q4_0)
    params = gdn.load_gguf_layer(path, LAYER)
    assert_same_bits(params.out_proj, gdn.quantize_q4(weights["out_proj"]))
    assert_refused(
        lambda: gdn.write_gguf(tmp_path / "g.gguf", {0: params}, NARROW),
        "g.gguf: not written: layer 0: qwen35 tiles the value heads",
        "heads of 16; needed a multiple of 32, or architecture 'qwen3next'",
        error=gdn.CheckpointError,
    )
    gdn.write_gguf(tmp_path / "g.gguf", {0: params}, NARROW, architecture="qwen3next")
    assert_same_bits(gdn.load_gguf_layer(tmp_path / "g.gguf", 0).out_proj, params.out_proj)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["attn_gate.weight", "ssm_a", "ssm_dt.bias"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, name: str, value: float):
    path, full = tmp_path / "f.gguf", f"blk.{LAYER}.{name}"
    tensors = block(layer_tensors(draw_weights(EQUAL, 1), EQUAL, "qwen35"))
    tensors[full].reshape(-1)[1] = value
    write(path, tensors, metadata(EQUAL, "qwen35"))
    refused(path, full, f"is {value}; needed finite numbers")


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path):
    path, full = tmp_path / "f.gguf", f"blk.{LAYER}.attn_qkv.weight"
    tensors = block(layer_tensors(draw_weights(EQUAL, 1), EQUAL, "qwen35"))
    blocks = gguf.quants.quantize(tensors[full], Type.Q4_0)
    blocks[5, :2] = 0x00, 0x7C
    write(path, tensors, metadata(EQUAL, "qwen35"), raw={full: (blocks, Type.Q4_0)})
    refused(path, f"{full} scale[5, 0] is inf")


@pytest.mark.parametrize("value", [0.0, -0.0, 0.5])
def test_a_decay_that_is_no_negative_exponential_is_refused(tmp_path: Path, value: float):
    path, full = tmp_path / "f.gguf", f"blk.{LAYER}.ssm_a"
    tensors = block(layer_tensors(draw_weights(EQUAL, 1), EQUAL, "qwen35"))
    tensors[full][1] = value
    write(path, tensors, metadata(EQUAL, "qwen35"))
    refused(path, f"{full} holds {value}; needed -exp(A_log), below 0")


def test_an_A_log_that_contradicts_its_exponential_is_refused(tmp_path: Path):
    path = tmp_path / "f.gguf"
    weights = draw_weights(EQUAL, 1)
    tensors = layer_tensors(weights, EQUAL, "qwen35")
    write(path, block(tensors | {"ssm_a_log": tensors["ssm_a"]}), metadata(EQUAL, "qwen35"))
    refused(path, f"blk.{LAYER}.ssm_a is not -exp of tensor blk.{LAYER}.ssm_a_log")
    write(path, block(tensors | {"ssm_a_log": weights["A_log"]}), metadata(EQUAL, "qwen35"))
    assert_same_bits(gdn.load_gguf_layer(path, LAYER).A_log, weights["A_log"])


@pytest.mark.parametrize(
    ("change", "options", "said", "error"),
    [
        ({"dt_bias": jnp.full(2, jnp.nan)}, {}, "layer 0: dt_bias[0] is nan", gdn.CheckpointError),
        ({"A_log": jnp.full(2, 89.0)}, {}, "exp(A_log) is 0 or inf", gdn.CheckpointError),
        ({"A_log": jnp.full(2, -110.0)}, {}, "exp(A_log) is 0 or inf", gdn.CheckpointError),
        ({"dt_bias": jnp.zeros(3)}, {}, "layer 0: params.dt_bias has", gdn.ShapeError),
        ({}, {"architecture": "llama"}, "no architecture 'llama'", gdn.GDNError),
        ({}, {"layer_types": ["full_attention"]}, "layer 0 is a full", gdn.CheckpointError),
        ({}, {"layer_types": []}, "layer is 0; needed", gdn.CheckpointError),
    ],
)
def test_a_refused_write_leaves_the_old_file(
    tmp_path: Path,
    change: dict[str, Any],
    options: dict[str, Any],
    said: str,
    error: type[Exception],
):
    path = tmp_path / "f.gguf"
    path.write_bytes(b"old")
    params = dataclasses.replace(drawn(EQUAL, 0, "f32"), **change)
    assert_refused(lambda: gdn.write_gguf(path, {0: params}, EQUAL, **options), said, error=error)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("layers", [{}, {-1: None}, {"0": None}, [1]])
def test_layers_that_are_none_are_refused(tmp_path: Path, layers: Any):
    assert_refused(lambda: gdn.write_gguf(tmp_path / "f.gguf", layers, EQUAL))
    assert not list(tmp_path.iterdir())
