"""Checkpoint directories that cannot be loaded: one line that names tensor and file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gdn_jax as gdn
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
from tests.support.tools import assert_refused


def test_missing_directory_config_and_weights_are_refused(tmp_path: Path):
    refused(tmp_path / "absent", "absent: no such directory")
    path = copy(TEXT, tmp_path)
    (path / "model.safetensors").unlink()
    refused(path, f"{path}: no weights", "model.safetensors.index.json")
    (path / "config.json").unlink()
    assert_refused(
        lambda: gdn.load_hf_layer(path, LAYER), "config.json: no such file", error=gdn.ConfigError
    )


@pytest.mark.parametrize(
    ("keys", "fragments"),
    [
        ({"model_type": "llama"}, ["model_type is llama", "qwen3_5_text", "qwen3_next"]),
        ({"model_type": None}, ["model_type is None"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"layer_types": "linear_attention"}, ["layer_types is 'linear_attention'", "list"]),
        (
            {"layer_types": ["linear_attention", "sliding_attention"]},
            ["layer_types[1] is 'sliding_attention'"],
        ),
        ({"num_hidden_layers": 6}, ["layer_types has 4 entries", "num_hidden_layers = 6"]),
        ({"layer_types": None, "num_hidden_layers": None}, ["num_hidden_layers is None"]),
        (
            {"layer_types": None, "full_attention_interval": 0},
            ["full_attention_interval is 0", "positive integer"],
        ),
    ],
)
def test_bad_configs_are_refused(tmp_path: Path, keys: dict[str, Any], fragments: list[str]):
    path = copy(TEXT, tmp_path)
    edit_json(path / "config.json", lambda raw: raw.update(keys))
    refused(path, "config.json", *fragments)


def test_sizes_no_layer_can_have_are_refused(tmp_path: Path):
    path = copy(TEXT, tmp_path)
    edit_json(path / "config.json", lambda raw: raw.update(linear_num_value_heads=5))
    assert_refused(lambda: gdn.load_hf_layer(path, LAYER), "multiple", error=gdn.ConfigError)
    edit_json(path / "config.json", lambda raw: raw.update(text_config=[]))
    assert_refused(lambda: gdn.load_hf_layer(path, LAYER), "text_config", error=gdn.ConfigError)


@pytest.mark.parametrize("layer", [-1, 4, True, 2.0, "2"])
def test_layers_out_of_range_are_refused(layer: Any):
    refused(CHECKPOINTS / TEXT.directory, f"layer is {layer!r}; needed 0 to 3", layer=layer)


def test_full_attention_layers_are_refused():
    for fixture, layer in ((TEXT, 3), (SHARDED, 3), (NEXT, 1)):
        linear = ", ".join(map(str, fixture.linear))
        refused(
            CHECKPOINTS / fixture.directory,
            f"layer {layer} is a full_attention layer",
            f"needed a linear_attention layer: {linear}",
            layer=layer,
        )


def test_a_layer_without_tensors_is_refused(tmp_path: Path):
    path = copy(NEXT, tmp_path)
    edit_json(path / "config.json", lambda raw: raw.update(full_attention_interval=4))
    refused(
        path,
        "model.safetensors: no tensor under",
        "model.language_model.layers.1.linear_attn. or model.layers.1.linear_attn.",
        layer=1,
    )


@pytest.mark.parametrize(
    ("name", "change", "needed"),
    [
        ("in_proj_z.weight", lambda x: x.reshape(-1), "has shape [1536]; needed [48, 32]"),
        ("in_proj_qkv.weight", lambda x: x.T, "has shape [32, 80]; needed [80, 32]"),
        ("out_proj.weight", lambda x: x[:, ::8], "has shape [32, 6]; needed [32, 48]"),
        ("conv1d.weight", lambda x: x[:, 0], "has shape [80, 4]; needed [80, 1, 4]"),
        ("A_log", lambda x: x[None], "has shape [1, 4]; needed [4]"),
        ("in_proj_qkv.weight", lambda x: x.astype(np.int8), "is I8; needed F32 or BF16 or F16"),
        ("A_log", lambda x: x.astype(np.float64), "is F64; needed"),
        ("out_proj.weight", lambda x: x.astype(ml_dtypes.float8_e4m3fn), "is F8_E4M3; needed"),
    ],
)
def test_tensors_of_another_shape_or_dtype_are_refused(
    tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray], needed: str
):
    path, full = copy(TEXT, tmp_path), tensor(TEXT, name)

    def replace(tensors: Tensors) -> None:
        tensors[full] = np.ascontiguousarray(change(tensors[full]))

    edit_tensors(path / "model.safetensors", replace)
    refused(path, "model.safetensors: tensor", full, needed)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["in_proj_qkv.weight", "dt_bias"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, name: str, value: float):
    path, full = copy(TEXT, tmp_path), tensor(TEXT, name)
    edit_tensors(path / "model.safetensors", lambda t: t[full].reshape(-1).__setitem__(3, value))
    place = "[3]" if name == "dt_bias" else "[0, 3]"
    refused(path, f"model.safetensors: {full}{place} is {value}; needed finite")


@pytest.mark.parametrize("fixture", FIXTURES)
@pytest.mark.parametrize("name", ["A_log", "conv1d.weight", "out_proj.weight"])
def test_missing_tensors_are_refused(fixture: Fixture, tmp_path: Path, name: str):
    path, full = copy(fixture, tmp_path), tensor(fixture, name)
    source = "model.safetensors"
    if fixture is SHARDED:
        source = "model.safetensors.index.json"
        edit_json(path / source, lambda raw: raw["weight_map"].pop(full))
    else:
        edit_tensors(path / source, lambda tensors: tensors.pop(full))
    refused(path, f"{source}: no tensor {full}")


@pytest.mark.parametrize("name", ["conv1d.bias", "in_proj_qkv.qweight", "norm.bias"])
def test_unexpected_tensors_are_refused(tmp_path: Path, name: str):
    path, full = copy(TEXT, tmp_path), tensor(TEXT, name)
    edit_tensors(path / "model.safetensors", lambda t: t.update({full: np.zeros(80, np.float32)}))
    refused(path, f"model.safetensors: unexpected tensor {full}")


def test_the_tensors_of_the_other_architecture_are_refused(tmp_path: Path):
    path = copy(NEXT, tmp_path)
    edit_json(path / "config.json", lambda raw: raw.update(model_type="qwen3_5_text"))
    refused(
        path,
        f"no tensor {tensor(NEXT, 'in_proj_qkv.weight')}",
        f"unexpected tensor {tensor(NEXT, 'in_proj_qkvz.weight')}",
        "a qwen3_5 layer has in_proj_qkv.weight, ",
    )


def test_truncated_files_are_refused(tmp_path: Path):
    path = copy(TEXT, tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 1, 1000, 4, 0):
        path.write_bytes(whole[:size])
        refused(path.parent, "model.safetensors: truncated or not a safetensors file")
    shard = copy(SHARDED, tmp_path) / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    refused(shard.parent, f"{shard.name}: truncated", tensor(SHARDED, "conv1d.weight"))


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path):
    path = copy(SHARDED, tmp_path)
    shard, index = path / "model-00003-of-00003.safetensors", path / "model.safetensors.index.json"
    full = tensor(SHARDED, "in_proj_b.weight")
    edit_tensors(shard, lambda tensors: tensors.pop(full))
    refused(path, f"{shard.name}: no tensor {full}, which", f"{index.name} places there")
    shard.unlink()
    refused(
        path,
        f"{shard.name}: no such file",
        f"needed for tensor {tensor(SHARDED, 'in_proj_qkv.weight')}",
    )
    edit_json(index, lambda raw: raw.update(weight_map=[]))
    refused(path, f"{index.name}: no weight_map")
    index.write_text("{", encoding="utf-8")
    refused(path, f"{index.name}: cannot be read as JSON")
