"""Layers of Hugging Face directories written by ``transformers``: what is loaded, and as what."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import gdn_jax as gdn
from gdn_jax.layer.params import LARGE, check_params
from tests.support.checkpoints import (
    CHECKPOINTS,
    FIXTURES,
    LAYER,
    NEXT,
    SHARDED,
    TEXT,
    Fixture,
    Tensors,
    copy,
    edit_json,
    edit_tensors,
    refused,
    tensor,
)
from tests.support.tools import assert_close, assert_refused, assert_same_bits, decode


def widened(params: gdn.GDNParams) -> gdn.GDNParams:
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_layer_computes_what_transformers_computes(fixture: Fixture):
    params = gdn.load_hf_layer(CHECKPOINTS / fixture.directory, LAYER)
    expected = load_file(CHECKPOINTS / fixture.directory / "expected.safetensors")
    xs = jnp.asarray(expected["xs"])
    ys, state = decode(params, gdn.init_state(fixture.cfg, len(xs)), xs, fixture.cfg)
    assert_close(ys, expected["ys_one_shot"], 1e-5, "one shot")
    assert_close(ys, expected["ys_cached"], 1e-5, "cached")
    assert_close(state.S, expected["S"], 1e-5, "S")
    window = np.swapaxes(expected["window"], 1, 2)
    assert_close(state.conv_hist, window[:, 1:], 1e-5, "convolution history")


@pytest.mark.parametrize("fixture", FIXTURES)
def test_config_is_understood(fixture: Fixture):
    checkpoint = gdn.HFCheckpoint.open(CHECKPOINTS / fixture.directory)
    assert checkpoint.cfg == fixture.cfg
    assert checkpoint.architecture == fixture.architecture
    assert checkpoint.linear_layers == fixture.linear
    assert len(checkpoint.layer_types) == 4


@pytest.mark.parametrize("fixture", FIXTURES)
def test_large_projections_keep_the_stored_dtype_on_demand(fixture: Fixture):
    exact = gdn.load_hf_layer(CHECKPOINTS / fixture.directory, LAYER)
    stored = gdn.load_hf_layer(str(CHECKPOINTS / fixture.directory), LAYER, dtype=fixture.stored)
    for params, dtype in ((exact, jnp.float32), (stored, fixture.stored)):
        check_params("test", params, fixture.cfg)
        for field in dataclasses.fields(params):
            wanted = dtype if field.name in LARGE else jnp.float32
            assert getattr(params, field.name).dtype == wanted, field.name
    assert_same_bits(widened(stored), exact)


def test_small_float32_tensors_keep_every_bit_beside_bfloat16_projections():
    tensors = load_file(CHECKPOINTS / TEXT.directory / "model.safetensors")
    params = gdn.load_hf_layer(CHECKPOINTS / TEXT.directory, LAYER, dtype="bfloat16")
    A_log = tensors[tensor(TEXT, "A_log")]
    assert A_log.dtype == np.float32
    assert (A_log != A_log.astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    assert_same_bits(params.A_log, A_log)
    assert_same_bits(params.norm_weight, tensors[tensor(TEXT, "norm.weight")])
    dt_bias = tensors[tensor(TEXT, "dt_bias")]
    assert dt_bias.dtype == ml_dtypes.bfloat16
    assert_same_bits(params.dt_bias, dt_bias.astype(np.float32))


def test_a_dtype_that_would_round_is_refused(tmp_path: Path):
    refused(
        CHECKPOINTS / SHARDED.directory,
        "model-00003-of-00003.safetensors",
        tensor(SHARDED, "in_proj_qkv.weight"),
        "float32, and bfloat16 would round",
        dtype=jnp.bfloat16,
    )
    refused(CHECKPOINTS / NEXT.directory, tensor(NEXT, "out_proj.weight"), dtype="bfloat16")
    path, name = copy(TEXT, tmp_path), tensor(TEXT, "in_proj_z.weight")

    def without_float16_subnormals(tensors: Tensors) -> None:
        for field in LARGE:
            weight = tensors[tensor(TEXT, f"{field}.weight")]
            weight[...] = np.where(np.abs(weight) < 2**-14, 0, weight)

    edit_tensors(path / "model.safetensors", without_float16_subnormals)
    halves = gdn.load_hf_layer(path, LAYER, dtype=jnp.float16)
    assert_same_bits(widened(halves), gdn.load_hf_layer(path, LAYER))
    edit_tensors(path / "model.safetensors", lambda t: t[name].__setitem__((3, 4), 1e5))
    refused(path, name, "float16 would round 1 of its 1536 values", dtype=jnp.float16)


@pytest.mark.parametrize("dtype", ["int8", "float64", "q4", None])
def test_other_target_dtypes_are_refused(dtype: Any):
    assert_refused(
        lambda: gdn.load_hf_layer(CHECKPOINTS / TEXT.directory, LAYER, dtype=dtype),
        repr(dtype),
        "needed float32, bfloat16 or float16",
        error=gdn.ShapeError,
    )


@pytest.mark.parametrize(
    ("keys", "linear"),
    [
        ({}, (0, 1, 2)),
        ({"full_attention_interval": 3, "num_hidden_layers": 7}, (0, 1, 3, 4, 6)),
        ({"full_attention_interval": 1}, ()),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, (1, 3)),
        (
            {"layer_types": ["linear_attention"] * 4, "full_attention_interval": 2},
            (0, 1, 2, 3),
        ),
    ],
)
def test_layer_kinds(tmp_path: Path, keys: dict[str, Any], linear: tuple[int, ...]):
    path = copy(NEXT, tmp_path)
    edit_json(path / "config.json", lambda raw: raw.pop("full_attention_interval"))
    edit_json(path / "config.json", lambda raw: raw.update(keys))
    assert gdn.HFCheckpoint.open(path).linear_layers == linear


@pytest.mark.parametrize("fixture", [TEXT, SHARDED], ids=lambda f: f.directory)
def test_mixture_of_experts_layers_are_the_same(fixture: Fixture, tmp_path: Path):
    path = copy(fixture, tmp_path)
    text = (path / "config.json").read_text(encoding="utf-8")
    for name in ("qwen3_5_text", "qwen3_5"):
        text = text.replace(f'"{name}"', f'"{name.replace("3_5", "3_5_moe")}"')
    (path / "config.json").write_text(text, encoding="utf-8")
    assert "qwen3_5_moe_text" in text
    assert gdn.HFCheckpoint.open(path).architecture == "qwen3_5"
    assert_same_bits(
        gdn.load_hf_layer(path, LAYER), gdn.load_hf_layer(CHECKPOINTS / fixture.directory, LAYER)
    )


def test_only_the_shards_of_the_layer_are_needed(tmp_path: Path):
    path = copy(SHARDED, tmp_path)
    (path / "model-00001-of-00003.safetensors").unlink()
    assert_same_bits(
        gdn.load_hf_layer(path, LAYER), gdn.load_hf_layer(CHECKPOINTS / SHARDED.directory, LAYER)
    )
