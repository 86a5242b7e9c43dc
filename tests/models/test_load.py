"""Whole models from Hugging Face directories: every weight, in every width, and what is refused."""

import importlib
import json
import tracemalloc
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.loading import memory, stored
from gdn_jax.models.loading.load import config_of, load_params
from tests.support.made_model import (
    TINY,
    Tensors,
    bfloat16,
    by_stored_name,
    tiny_tensors,
    write_model,
)
from tests.support.tools import assert_refused, assert_same_bits

CFG = ModelConfig.from_hf(TINY)
LOAD = importlib.import_module("gdn_jax.models.loading.load")
"""The module: the package has a function of its name."""
DOWN = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(4)]
"""48 columns, no multiple of 32."""


def is_projection(name: str) -> bool:
    small = ("in_proj_a", "in_proj_b", "conv1d")
    return ("_proj" in name and not any(part in name for part in small)) or name == "lm_head.weight"


def expected(name: str, x: np.ndarray, weights: str) -> Any:
    """What a stored tensor must become."""
    x = x[:, 0] if "conv1d" in name else x
    if weights == "f32" or not (is_projection(name) or "embed" in name):
        return x.astype(np.float32)
    if weights == "q4" and is_projection(name) and name not in DOWN:
        return gdn.quantize_q4(x)
    return bfloat16(x)


def assert_loaded(params: Any, tensors: Tensors, weights: str) -> None:
    found = by_stored_name(params)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        wanted = expected(name, x, weights)
        assert jax.tree.structure(found[name]) == jax.tree.structure(wanted), name
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype, name
        assert_same_bits(found[name], wanted, name)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("weights", ["f32", "bf16", "q4"])
def test_every_weight_of_every_source(tmp_path: Path, weights: str, source: str) -> None:
    tensors = {name: np.asarray(jnp.asarray(x, source)) for name, x in tiny_tensors().items()}
    write_model(tmp_path, tensors)
    params = load_params(tmp_path, config_of(tmp_path), weights=weights)
    assert_loaded(params, tensors, weights)
    assert params.nbytes == sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.parametrize("weights", ["f32", "q4"])
def test_pieces_of_rows_shards_and_what_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(stored, "NUMBERS_AT_ONCE", 7 * 32)
    tensors = tiny_tensors()
    skipped = ["model.visual.blocks.0.w", "model.visual.pos", "mtp.fc.weight"]
    prefixed = {
        name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()
    }
    more = {name: np.zeros((3, 5), np.int8) for name in skipped}
    write_model(tmp_path, prefixed | more, shards=3)
    lines: list[str] = []
    params = load_params(tmp_path, CFG, weights=weights, notes=lines.append)
    assert_loaded(params, tensors, weights)
    (line,) = lines
    assert "53 tensors" in line
    assert "skipped: 1 of multi-token prediction, 2 of vision" in line
    assert ("bf16, as their columns are no multiple of 32: 4" in line) == (weights == "q4")


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path, tensors, tie_word_embeddings=True)
    lines: list[str] = []
    params = load_params(tmp_path, config_of(tmp_path), weights="q4", notes=lines.append)
    assert params.head is None
    assert params.embedding.dtype == jnp.bfloat16
    assert "skipped: 1 of a head that is the embedding" in lines[0]
    del tensors["lm_head.weight"]
    assert_loaded(params, tensors, "q4")


def test_progress_counts_the_bytes_of_every_tensor() -> None:
    seen: list[tuple[str, int, int]] = []
    load_params(TINY, CFG, progress=lambda *step: seen.append(step))
    tensors, done = tiny_tensors(), 0
    assert {name for name, _, _ in seen} == tensors.keys()
    for name, so_far, total in seen:
        done += tensors[name].nbytes
        assert so_far == done
        assert total == sum(x.nbytes for x in tensors.values())


def refused(path: Any, *fragments: str, error: type[Exception] = gdn.CheckpointError) -> str:
    return assert_refused(lambda: load_params(path, CFG), str(path), *fragments, error=error)


def test_everything_wrong_with_the_tensors_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tiny_tensors()
    for name in ("model.norm.weight", *DOWN[:2]):
        del tensors[name]
    tensors |= {"model.layers.1.extra": np.zeros(3, np.float32)}
    tensors |= {"model.layers.0.linear_attn.A_log": np.zeros((2, 2), np.float32)}
    tensors |= {"lm_head.weight": np.zeros((128, 32), np.float64)}
    write_model(tmp_path, tensors)
    monkeypatch.setattr(LOAD, "to_device", lambda *_: pytest.fail("loaded"))
    refused(
        tmp_path,
        "nothing loaded",
        f"3 missing ({DOWN[0]}, {DOWN[1]}, model.norm.weight)",
        "1 unexpected (model.layers.1.extra)",
        "1 of another shape (model.layers.0.linear_attn.A_log is [2, 2], needed [4])",
        "1 of another type (lm_head.weight is F64, needed F32, BF16, F16)",
    )


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    write_model(tmp_path, {"model.embed_tokens.weight": np.zeros((128, 32), np.float32)})
    assert len(refused(tmp_path, "52 missing (lm_head.weight, ", " and 44 more)")) < 700


def test_shards_that_are_missing_or_truncated(tmp_path: Path) -> None:
    write_model(tmp_path, tiny_tensors(), shards=3)
    one, two, _ = sorted(tmp_path.glob("*.safetensors"))
    whole = two.read_bytes()
    two.write_bytes(whole[:-8])
    refused(tmp_path, two.name, "truncated or not a safetensors file")
    for path in (one, two):
        path.unlink()
    refused(tmp_path, f"2 of 3 files missing: {one.name}, {two.name}")


@pytest.mark.parametrize(
    ("changes", "fragments", "error"),
    [
        ({"model_type": "qwen3_5_moe_text"}, ("'qwen3_5_moe_text'", "a dense"), gdn.ConfigError),
        ({"model_type": "llama"}, ("'llama'",), gdn.ConfigError),
        ({"mlp_only_layers": [2]}, ("mlp_only_layers is [2]",), gdn.ConfigError),
        ({"output_gate_type": "sigmoid"}, ("needed 'swish'",), gdn.ConfigError),
        ({"quantization_config": {}}, ("unknown settings quantization_config",), gdn.ConfigError),
    ],
)
def test_other_models_are_refused(
    tmp_path: Path, changes: dict, fragments: tuple[str, ...], error: type[Exception]
) -> None:
    write_model(tmp_path, {}, **changes)
    refused(tmp_path, *fragments, error=error)


def test_quantised_sources_and_what_is_no_model_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "no such directory or file")
    refused(tmp_path, "config.json: no such file", error=gdn.ConfigError)
    text = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    raw = {"text_config": text, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    refused(tmp_path, "quantization_config is set", "weights='q4'")
    assert_refused(
        lambda: load_params(TINY, CFG, weights="int8"), "'int8'", error=gdn.UnknownNameError
    )


def test_settings_of_public_configurations_are_known(tmp_path: Path) -> None:
    write_model(tmp_path, {}, mlp_only_layers=[], output_gate_type="swish")
    assert config_of(tmp_path) == CFG


def test_a_number_that_is_not_finite_is_found_in_any_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "NUMBERS_AT_ONCE", 64)
    tensors = tiny_tensors()
    tensors["lm_head.weight"][77, 3] = np.inf
    write_model(tmp_path, tensors)
    refused(tmp_path, "lm_head.weight[77, 3] is inf")
    assert_refused(
        lambda: load_params(tmp_path, CFG, weights="q4"),
        "tensor lm_head.weight: quantize_q4: row 77, group 0",
        error=gdn.QuantizationError,
    )


@pytest.mark.parametrize(("weights", "advice"), [("f32", "'bf16' or 'q4'"), ("q4", "a smaller")])
def test_a_model_must_fit_the_device(
    monkeypatch: pytest.MonkeyPatch, weights: str, advice: str
) -> None:
    size = load_params(TINY, CFG, weights=weights).nbytes
    monkeypatch.setattr(memory, "free_bytes", lambda: size)
    load_params(TINY, CFG, weights=weights)
    monkeypatch.setattr(memory, "free_bytes", lambda: size - 1)
    monkeypatch.setattr(LOAD, "to_device", lambda *_: pytest.fail("loaded"))
    assert_refused(
        lambda: load_params(TINY, CFG, weights=weights),
        f"needed {size / 1e6:.1f} MB",
        "MB free",
        advice,
        error=gdn.DeviceMemoryError,
    )


def test_a_gpu_says_what_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"bytes_limit": 18 * 10**9, "bytes_in_use": 3 * 10**9}
    gpu = types.SimpleNamespace(platform="gpu", device_kind="GPU X", memory_stats=lambda: stats)
    monkeypatch.setattr(memory.jax, "devices", lambda: [gpu])
    memory.check_fits("weights", 15 * 10**9, "less")
    assert_refused(
        lambda: memory.check_fits("weights", 15 * 10**9 + 1, "less"),
        "weights: needed 15.0 GB on the device, GPU X has 15.0 GB free; try less",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        error=gdn.DeviceMemoryError,
    )


@pytest.mark.parametrize("weights", ["bf16", "q4"])
def test_the_host_holds_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """Arrays of this device are host memory too, so the model itself is taken off the peak."""
    monkeypatch.setattr(stored, "NUMBERS_AT_ONCE", 2**14)
    monkeypatch.setattr(stored, "THREADS", 4)
    tensors = tiny_tensors()
    F = 2**14
    for i in range(4):
        for name, shape in (("gate", (F, 32)), ("up", (F, 32)), ("down", (32, F))):
            x = np.random.default_rng(i).standard_normal(shape).astype(np.float32)
            tensors[f"model.layers.{i}.mlp.{name}_proj.weight"] = x
    write_model(tmp_path, tensors, intermediate_size=F)
    total, largest = sum(x.nbytes for x in tensors.values()), 4 * 32 * F
    cfg = config_of(tmp_path)
    del tensors
    tracemalloc.start()
    try:
        params = load_params(tmp_path, cfg, weights=weights)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - params.nbytes < 1.5 * largest < total / 8
