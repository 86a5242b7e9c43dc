"""Hugging Face directories written by ``transformers`` (see data/make_checkpoints.py)."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gdn_jax as gdn
from gdn_jax.params import LARGE, check_params
from tests.tools import assert_close, assert_refused, assert_same_bits, decode

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
LAYER = 2
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A directory, what its config.json must be understood to say, and how it stores weights."""

    directory: str
    cfg: gdn.GDNConfig
    architecture: str
    linear: tuple[int, ...]
    prefix: str
    stored: Any


TEXT = Fixture(
    "qwen3_5-text", gdn.GDNConfig(32, 2, 4, 8, 12), "qwen3_5", (0, 1, 2), "model.", jnp.bfloat16
)
SHARDED = Fixture(
    "qwen3_5-sharded",
    gdn.GDNConfig(24, 2, 6, 8, 4),
    "qwen3_5",
    (0, 1, 2),
    "model.language_model.",
    jnp.float32,
)
NEXT = Fixture(
    "qwen3_next", gdn.GDNConfig(24, 3, 6, 8, 10), "qwen3_next", (0, 2), "model.", jnp.float16
)
FIXTURES = [pytest.param(f, id=f.directory) for f in (TEXT, SHARDED, NEXT)]


def tensor(fixture: Fixture, name: str) -> str:
    return f"{fixture.prefix}layers.{LAYER}.linear_attn.{name}"


def copy(fixture: Fixture, tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / fixture.directory, tmp_path / fixture.directory))


def edit_tensors(path: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")


def widened(params: gdn.GDNParams) -> gdn.GDNParams:
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def refused(path: Path, *fragments: str, layer: Any = LAYER, **options: Any) -> None:
    def load() -> Any:
        return gdn.load_hf_layer(path, layer, **options)

    assert_refused(load, *fragments, error=gdn.CheckpointError)


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
