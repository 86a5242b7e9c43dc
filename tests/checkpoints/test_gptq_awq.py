"""GPTQ and AWQ directories: packed nibble by nibble here, read as exact float32 values."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.verify.draw import draw_weights
from tests.support.made_checkpoint import Arrays, stored_layer, write_config, write_layers
from tests.support.tools import assert_refused, assert_same_bits

CFG = gdn.GDNConfig(128, 4, 8, 8, 16)
"""Both widths are 128: one group of the usual size, or several smaller ones."""

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
AWQ = {
    **{"quant_method": "awq", "bits": 4, "group_size": 128},
    **{"version": "gemm", "zero_point": True},
}
V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
FORMATS = [
    pytest.param(GPTQ, "zero points stored minus one", id="gptq"),
    pytest.param(GPTQ | {"checkpoint_format": "gptq"}, "minus one", id="gptq-named"),
    pytest.param(V2, "zero points stored as they are", id="gptq-v2"),
    pytest.param(AWQ, "zero points stored as they are", id="awq"),
    pytest.param(AWQ | {"version": "GEMM"}, "as they are", id="awq-upper"),
]
LAYER = 1
SOURCE = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Integers:
    """A matrix [N, K] as integers q [K, N], zero points z and scales s [K/group, N]."""

    q: np.ndarray
    z: np.ndarray
    s: np.ndarray

    def values(self) -> np.ndarray:
        """The weights in float64, one by one."""
        K, N = self.q.shape
        group = K // len(self.z)
        w = np.empty((N, K))
        for k in range(K):
            w[:, k] = (self.q[k] - self.z[k // group]) * self.s[k // group].astype(np.float64)
        return w


def draw(seed: int, N: int, K: int, group: int, low: int, dtype: Any = np.float16) -> Integers:
    rng = np.random.default_rng(seed)
    groups = K // group
    z = rng.integers(low, low + 16, (groups, N))
    s = (2.0 ** rng.uniform(-20, -6, (groups, N))).astype(dtype)
    return Integers(rng.integers(0, 16, (K, N)), z, s)


def words(nibbles: list[np.ndarray]) -> np.ndarray:
    """int32 words of eight nibbles, the first in the lowest bits."""
    total = np.zeros(nibbles[0].shape, np.int64)
    for p, nibble in enumerate(nibbles):
        for bit in range(4):
            total += ((nibble >> bit) & 1) << (4 * p + bit)
    return total.astype(np.uint32).view(np.int32)


def pack(x: Integers, method: str, offset: int) -> Arrays:
    """What stands for a ``.weight``, by the last part of its name."""
    if method == "gptq":
        qweight = words([x.q[p::8] for p in range(8)])
        qzeros = words([x.z[:, p::8] - offset for p in range(8)])
    else:
        first_to_last = [0, 2, 4, 6, 1, 3, 5, 7]
        qweight = words([x.q[:, column::8] for column in first_to_last])
        qzeros = words([x.z[:, column::8] for column in first_to_last])
    return {"qweight": qweight, "qzeros": qzeros, "scales": x.s}


def make(
    path: Path,
    config: dict[str, Any],
    architecture: str = "qwen3_5",
    *,
    kept: tuple[str, ...] = (),
    dtype: Any = np.float16,
    change: Callable[[Arrays], Any] | None = None,
) -> Arrays:
    """A directory with one packed layer; returns its stored tensors, dequantised in float64."""
    method = config["quant_method"]
    offset = int(method == "gptq" and config.get("checkpoint_format") != "gptq_v2")
    tensors = stored_layer(draw_weights(CFG, seed=3), CFG, architecture)
    values, stored = dict(tensors), dict(tensors)
    for seed, (name, weight) in enumerate(sorted(tensors.items())):
        if weight.ndim == 2 and name not in kept:
            N, K = weight.shape
            group = K if config["group_size"] == -1 else config["group_size"]
            x = draw(seed, N, K, group, offset, dtype)
            stem = name.removesuffix("weight")
            del stored[name]
            stored |= {stem + part: packed for part, packed in pack(x, method, offset).items()}
            values[name] = x.values()
    if change is not None:
        change(stored)
    path.mkdir(exist_ok=True)
    write_config(path, CFG, architecture, quantization_config=config)
    write_layers(path, {LAYER: stored})
    return values


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize(("config", "said"), FORMATS)
def test_every_value_is_exact(tmp_path: Path, config: dict[str, Any], said: str, architecture: str):
    """Against a plain directory that stores the same values, for every field."""
    values = make(tmp_path / "packed", config, architecture)
    plain = {name: x.astype(np.float32) for name, x in values.items()}
    assert all((plain[name] == x).all() for name, x in values.items())
    (tmp_path / "plain").mkdir()
    write_config(tmp_path / "plain", CFG, architecture)
    write_layers(tmp_path / "plain", {LAYER: plain})
    expected = gdn.load_hf_layer(tmp_path / "plain", LAYER)
    params = gdn.load_hf_layer(tmp_path / "packed", LAYER)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    assert_same_bits(params, expected)
    checkpoint = gdn.HFCheckpoint.open(tmp_path / "packed")
    for word in (config["quant_method"], "groups of 128", said, "exactly to float32"):
        assert word in checkpoint.quantization
    assert gdn.HFCheckpoint.open(tmp_path / "plain").quantization == ""


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("config", [GPTQ, AWQ])
def test_group_sizes_and_scales(tmp_path: Path, config: dict[str, Any], group: int, dtype: Any):
    values = make(tmp_path, config | {"group_size": group}, dtype=dtype)
    params = gdn.load_hf_layer(tmp_path, LAYER)
    assert_same_bits(params.out_proj, values["out_proj.weight"].astype(np.float32))
    assert_same_bits(params.in_proj_qkv, values["in_proj_qkv.weight"].astype(np.float32))


def test_one_gptq_word_and_one_awq_word():
    """By hand: the word 0x76543210 is 0..7 in GPTQ, and AWQ puts nibble 1 into column 2."""
    from gdn_jax.checkpoints.gptq_awq import _AWQ_ORDER, _GPTQ_ORDER, _unpack

    word = np.array([0x76543210, -1], np.int32)
    assert _unpack(word, _GPTQ_ORDER).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [15] * 8]
    assert _unpack(word, _AWQ_ORDER)[0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_modules_that_were_not_converted_stay_as_they_are(tmp_path: Path):
    kept = ("in_proj_b.weight", "in_proj_a.weight", "out_proj.weight")
    values = make(tmp_path, AWQ | {"modules_to_not_convert": ["x"]}, kept=kept)
    params = gdn.load_hf_layer(tmp_path, LAYER)
    for name in ("in_proj_b", "in_proj_a", "out_proj", "in_proj_z"):
        expected = values[f"{name}.weight"].astype(np.float32)
        assert_same_bits(getattr(params, name), expected, name)


def test_a_dtype_that_would_round_is_refused(tmp_path: Path):
    make(tmp_path, GPTQ)
    assert_refused(
        lambda: gdn.load_hf_layer(tmp_path, LAYER, dtype="bfloat16"),
        "in_proj_qkv.qweight is float32, and bfloat16 would round",
        error=gdn.CheckpointError,
    )
    values = make(tmp_path, GPTQ, dtype=ml_dtypes.float8_e4m3fn, change=scales_to_half)
    loaded = gdn.load_hf_layer(tmp_path, LAYER, dtype="bfloat16").in_proj_z
    assert_same_bits(loaded, values["in_proj_z.weight"].astype(ml_dtypes.bfloat16))


def scales_to_half(stored: Arrays) -> None:
    for name, x in stored.items():
        if name.endswith("scales"):
            stored[name] = x.astype(np.float16)


def refused(path: Path, *fragments: str) -> None:
    assert_refused(lambda: gdn.load_hf_layer(path, LAYER), *fragments, error=gdn.CheckpointError)


@pytest.mark.parametrize("config", [GPTQ, GPTQ | {"desc_act": True}])
def test_a_plain_g_idx_changes_nothing_and_act_order_is_refused(
    tmp_path: Path, config: dict[str, Any]
):
    small = config | {"group_size": 32}
    order = (np.arange(128) // 32).astype(np.int32)

    def with_order(stored: Arrays) -> None:
        stems = [name.removesuffix("qweight") for name in stored if name.endswith("qweight")]
        stored.update({f"{stem}g_idx": order for stem in stems})

    values = make(tmp_path, small, change=with_order)
    params = gdn.load_hf_layer(tmp_path, LAYER)
    assert_same_bits(params.out_proj, values["out_proj.weight"].astype(np.float32))
    order[[3, 40]] = order[[40, 3]]
    make(tmp_path, small, change=with_order)
    refused(tmp_path, SOURCE, "in_proj_qkv.g_idx is not k // 32", "act-order", "desc_act false")


def test_act_order_without_its_order_is_refused(tmp_path: Path):
    make(tmp_path, GPTQ | {"desc_act": True})
    refused(tmp_path, "g_idx is absent under desc_act", "act-order is not read", "unquantised")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        *[
            ({"quant_method": method}, f"quant_method '{method}'; needed gptq or awq")
            for method in ("compressed-tensors", "fp8", "bitsandbytes", "auto-round", "mxfp4")
        ],
        ({"group_size": 64, "bits": 4}, "quant_method None"),
        ("gptq", "has bits None"),
        (GPTQ | {"bits": 8}, "bits 8; needed 4"),
        (AWQ | {"bits": None, "w_bit": 3}, "bits 3; needed 4"),
        (GPTQ | {"group_size": 0}, "group_size 0; needed a positive integer or -1"),
        (GPTQ | {"group_size": None}, "group_size None"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'; needed gptq"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format True"),
        (AWQ | {"version": "gemv"}, "version 'gemv'; needed gemm"),
        (AWQ | {"zero_point": False}, "zero_point False; needed True"),
    ],
)
def test_other_packings_are_refused_by_name(tmp_path: Path, config: Any, said: str):
    make(tmp_path, GPTQ)
    write_config(tmp_path, CFG, "qwen3_5", quantization_config=config)
    refused(tmp_path, "config.json: quantization_config has", said, "the unquantised original")


def test_packed_tensors_without_a_config_are_refused(tmp_path: Path):
    make(tmp_path, GPTQ)
    write_config(tmp_path, CFG, "qwen3_5")
    refused(tmp_path, "no tensor", "unexpected tensor", "in_proj_z.qweight")


def test_a_config_inside_text_config_is_found(tmp_path: Path):
    values = make(tmp_path, GPTQ)
    raw = (tmp_path / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text('{"text_config": ' + raw + "}", encoding="utf-8")
    loaded = gdn.load_hf_layer(tmp_path, LAYER).out_proj
    assert_same_bits(loaded, values["out_proj.weight"].astype(np.float32))


def replace(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], None]:
    return lambda stored: stored.update({name: np.ascontiguousarray(change(stored[name]))})


def nan_scale(s: np.ndarray) -> np.ndarray:
    s = s.copy()
    s[0, 5] = np.nan
    return s


@pytest.mark.parametrize("config", [GPTQ, AWQ])
@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lambda t: t.update({"in_proj_z.weight": np.zeros((128, 128), np.float32)}),
         ["unexpected tensor", "in_proj_z.weight"]),
        (lambda t: t.pop("in_proj_z.qzeros"), ["no tensor", "in_proj_z.qzeros"]),
        (lambda t: t.pop("out_proj.scales"), ["no tensor", "out_proj.scales"]),
        (lambda t: t.pop("out_proj.qweight"), ["no tensor", "out_proj.weight", "unexpected"]),
        (replace("out_proj.qweight", lambda x: x.reshape(-1)), ["out_proj.qweight has shape"]),
        (replace("out_proj.qzeros", lambda x: x[:, :3]), ["out_proj.qzeros has shape"]),
        (replace("out_proj.scales", lambda x: np.repeat(x, 2, 0)), ["scales has shape [2, 128]"]),
        (replace("out_proj.qweight", lambda x: x.astype(np.int64)), ["is I64; needed I32"]),
        (replace("out_proj.scales", lambda x: x.astype(np.float32)), ["is F32; needed F16 or"]),
        (replace("out_proj.scales", nan_scale), ["out_proj.scales[0, 5] is nan"]),
        (lambda t: t.update({"norm.qweight": t["out_proj.qweight"]}), ["unexpected", ".qweight"]),
        (lambda t: t.update({"in_proj_z.bias": np.zeros(128, np.float16)}), ["unexpected", "bias"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, config: dict[str, Any], change: Callable[[Arrays], Any], fragments: list[str]
):
    make(tmp_path, config, change=change)
    refused(tmp_path, SOURCE, *fragments)


def test_sizes_that_cannot_be_packed_are_refused(tmp_path: Path):
    make(tmp_path, GPTQ)
    write_config(tmp_path, CFG, "qwen3_5", quantization_config=GPTQ | {"group_size": 48})
    refused(tmp_path, "in_proj_qkv.qweight stands for [192, 128]", "the group of 48 columns")


def test_a_product_beyond_float32_is_refused(tmp_path: Path):
    def huge(stored: Arrays) -> None:
        stored["out_proj.scales"] = np.full((1, 128), 3e38, ml_dtypes.bfloat16)

    make(tmp_path, AWQ, change=huge)
    refused(tmp_path, "out_proj, dequantised,", "needed finite numbers")
