"""GGUF files: the conventions of others undone, written back, and what is refused."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.cli import main
from gdn_jax.gguf.reader import GGUFFile
from gdn_jax.gguf.writer import quantize_checkpoint
from gdn_jax.params import LARGE
from gdn_jax.verify.draw import draw_inputs, draw_weights
from tests import tools
from tests.made_checkpoint import make_checkpoint
from tests.made_gguf import Arrays, Type, layer_tensors, metadata, stored_values, write
from tests.tools import MAX_REL, assert_close, assert_refused, assert_same_bits

TWICE = gdn.GDNConfig(64, 3, 6, 8, 32)
THRICE = gdn.GDNConfig(96, 2, 6, 16, 32)
EQUAL = gdn.GDNConfig(32, 2, 2, 8, 32)
NARROW = gdn.GDNConfig(64, 2, 6, 8, 16)
CONFIGS = [
    pytest.param(TWICE, id="HV=2HK"),
    pytest.param(THRICE, id="HV=3HK"),
    pytest.param(EQUAL, id="HV=HK"),
]
KINDS = [
    pytest.param("qwen35", False, id="qwen35"),
    pytest.param("qwen35moe", False, id="qwen35moe"),
    pytest.param("qwen3next", False, id="qwen3next"),
    pytest.param("qwen3next", True, id="qwen3next-legacy"),
]
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0]
LAYER = 1


def block(tensors: Mapping[str, np.ndarray], layer: int = LAYER) -> Arrays:
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
    fields: dict[str, Any] = {
        name: x if isinstance(x, gdn.Q4Array) else jnp.asarray(x) for name, x in weights.items()
    }
    return gdn.GDNParams(**fields)


def ulps(a: Any, b: Any) -> int:
    """The largest distance of float32 values of one sign, in units of the last place."""
    left, right = (np.asarray(x, np.float32).view(np.int32).astype(np.int64) for x in (a, b))
    return int(np.abs(left - right).max())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("architecture", "fused"), KINDS)
@pytest.mark.parametrize("cfg", CONFIGS)
def test_every_type_of_every_architecture(
    tmp_path: Path, cfg: gdn.GDNConfig, architecture: str, fused: bool, kind: Type
):
    weights = made(tmp_path / "f.gguf", cfg, architecture, fused, projections=kind)
    params = gdn.load_gguf_layer(tmp_path / "f.gguf", LAYER)
    for name, x in weights.items():
        loaded = getattr(params, name)
        if name == "A_log":
            # -exp and its logarithm are rounded once each.
            assert_close(loaded, x, 2.0**-22, name)
            continue
        if name.startswith(("in_proj", "out_proj")):
            x = stored_values(x, kind)
        if name in LARGE and kind == Type.Q4_0:
            assert isinstance(loaded, gdn.Q4Array)
            assert_same_bits(loaded, gdn.quantize_q4(weights[name]), name)
            loaded = gguf.quants.dequantize(gdn.q4_to_gguf_blocks(loaded), kind)
        if name not in LARGE:
            x = x.astype(np.float32)
        assert loaded.dtype == x.dtype, name
        assert_same_bits(loaded, x, name)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen3next"])
@pytest.mark.parametrize("cfg", CONFIGS)
def test_a_loaded_layer_computes_what_its_weights_say(
    tmp_path: Path, cfg: gdn.GDNConfig, architecture: str
):
    """Against float64 over four tokens: the sign and the space of A_log tell from the second on."""
    weights = made(tmp_path / "f.gguf", cfg, architecture)
    xs = draw_inputs(cfg, 4, seed=3)
    file = GGUFFile.open(tmp_path / "f.gguf")
    assert file.cfg == cfg
    params = file.layer(LAYER)
    ys, state = tools.decode(params, gdn.init_state(file.cfg), jnp.asarray(xs)[None], file.cfg)
    expected = oracle.layer_trace(weights, cfg, xs)
    for t in range(4):
        assert_close(ys[0, t], expected["OUT"][t], MAX_REL["layer"], f"token {t}")
    assert_close(state.S[0], expected["S"][-1], MAX_REL["layer"], "S")


def test_the_first_token_from_zeros_does_not_see_A_log(tmp_path: Path):
    """Why the test above runs four tokens: here ssm_a is read as if it were A_log."""
    made(tmp_path / "f.gguf", TWICE)
    params = gdn.load_gguf_layer(tmp_path / "f.gguf", LAYER)
    wrong = dataclasses.replace(params, A_log=-jnp.exp(params.A_log))
    xs = jnp.asarray(draw_inputs(TWICE, 4, seed=3))[None]
    ys, bad = (tools.decode(p, gdn.init_state(TWICE), xs, TWICE)[0] for p in (params, wrong))
    assert_same_bits(ys[:, 0], bad[:, 0])
    assert tools.max_rel(bad[0, 3], ys[0, 3]) > 1e-2


@pytest.mark.parametrize("architecture", ["qwen35", "qwen3next"])
@pytest.mark.parametrize("cfg", CONFIGS)
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q4"])
def test_what_is_written_comes_back_bit_for_bit(
    tmp_path: Path, cfg: gdn.GDNConfig, architecture: str, kind: str
):
    layers = {i: drawn(cfg, i, kind) for i in (0, 2)}
    gdn.write_gguf(tmp_path / "f.gguf", layers, cfg, architecture=architecture)
    file = GGUFFile.open(tmp_path / "f.gguf")
    assert (file.cfg, file.architecture) == (cfg, architecture)
    assert file.linear_layers == (0, 2)
    for i, params in layers.items():
        loaded = file.layer(i)
        assert jax.tree.map(lambda x: x.dtype, loaded) == jax.tree.map(lambda x: x.dtype, params)
        assert_same_bits(loaded, params)


def drawn(cfg: gdn.GDNConfig, seed: int, kind: str) -> gdn.GDNParams:
    """Drawn weights; A_log has values near 0, of which many share a float32 -exp(A_log)."""
    weights: dict[str, Any] = draw_weights(cfg, seed)
    weights["A_log"][:2] = 1e-9, -3e-5
    dtypes = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32}
    for name in LARGE:
        x = weights[name]
        weights[name] = gdn.quantize_q4(x) if kind == "q4" else jnp.asarray(x, dtypes[kind])
    return to_params(weights)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "qwen3next"])
@pytest.mark.parametrize("cfg", CONFIGS)
def test_the_gguf_package_reads_what_is_written(
    tmp_path: Path, cfg: gdn.GDNConfig, architecture: str
):
    """Names, order, types, bytes and metadata, against the file made head by head."""
    weights = draw_weights(cfg, seed=7)
    quantised = {name: gdn.quantize_q4(weights[name]) for name in LARGE}
    params = dataclasses.replace(to_params(weights), **quantised)
    ours = tmp_path / "ours.gguf"
    types = ["linear_attention"] * 3 + ["full_attention"]
    gdn.write_gguf(ours, {LAYER: params}, cfg, architecture=architecture, layer_types=types)
    expected = block(layer_tensors(weights, cfg, architecture))
    reader = gguf.GGUFReader(ours)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    wanted = metadata(cfg, architecture)
    assert fields["general.architecture"] == architecture
    assert fields["general.description"] == (
        "The linear attention of these layers only, not a whole model"
    )
    for key, value in wanted.items():
        assert fields[key] == pytest.approx(value, rel=1e-7), key
    assert fields[f"{architecture}.attention.recurrent_layers"] == [True, True, True, False]
    found = {tensor.name: tensor for tensor in reader.tensors}
    extra = found.pop(f"blk.{LAYER}.ssm_a_log")
    assert_same_bits(np.sort(extra.data), np.sort(weights["A_log"]))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        large = name.split(".")[2] in ("attn_qkv", "attn_gate", "ssm_out")
        assert found[name].tensor_type == (Type.Q4_0 if large else Type.F32), name
        assert list(found[name].shape) == list(reversed(x.shape)), name
        stored = gguf.quants.quantize(np.ascontiguousarray(x), found[name].tensor_type)
        assert_same_bits(found[name].data, stored, name)


def test_a_file_of_others_goes_back_as_it_came(tmp_path: Path):
    """Read, written and read by the gguf package: the same bytes for all but -exp(A_log)."""
    made(tmp_path / "a.gguf", THRICE, projections=Type.Q4_0)
    file = GGUFFile.open(tmp_path / "a.gguf")
    gdn.write_gguf(tmp_path / "b.gguf", {LAYER: file.layer(LAYER)}, file.cfg)
    before, after = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / name).tensors}
        for name in ("a.gguf", "b.gguf")
    )
    for name, tensor in before.items():
        if name.endswith("ssm_a"):
            assert ulps(after[name].data, tensor.data) <= 4
        elif name.split(".")[2] not in ("ssm_beta", "ssm_alpha"):
            assert_same_bits(after[name].data, tensor.data, name)


def test_an_interval_is_written_where_the_kinds_follow_one(tmp_path: Path):
    params = {0: drawn(EQUAL, 0, "f32")}
    linear, full = "linear_attention", "full_attention"
    for types, interval in (
        ([linear, full, linear, full], 2),
        ([linear, linear], 3),
        ([linear, full, full], None),
    ):
        gdn.write_gguf(tmp_path / "f.gguf", params, EQUAL, layer_types=types)
        field = gguf.GGUFReader(tmp_path / "f.gguf").get_field("qwen35.full_attention_interval")
        assert (None if field is None else field.contents()) == interval
        assert GGUFFile.open(tmp_path / "f.gguf").layer_types == tuple(types)


@pytest.mark.parametrize(
    ("meta", "linear"),
    [
        ({}, (0, 1, 2)),
        ({"full_attention_interval": 2}, (0, 2)),
        ({"full_attention_interval": None}, (0, 1, 2)),
        ({"block_count": 7, "nextn_predict_layers": 2}, (0, 1, 2, 4)),
        ({"attention.recurrent_layers": [True, False, False, True]}, (0, 3)),
    ],
)
def test_layer_kinds(tmp_path: Path, meta: dict[str, Any], linear: tuple[int, ...]):
    tensors = layer_tensors(draw_weights(EQUAL, 1), EQUAL, "qwen35")
    everywhere = {k: x for i in range(7) for k, x in block(tensors, i).items()}
    wanted = metadata(EQUAL, "qwen35") | {f"qwen35.{key}": value for key, value in meta.items()}
    wanted = {key: value for key, value in wanted.items() if value is not None}
    write(tmp_path / "f.gguf", everywhere, wanted)
    assert GGUFFile.open(tmp_path / "f.gguf").linear_layers == linear


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


@pytest.mark.parametrize("rule", ["q4_0", "mse"])
@pytest.mark.parametrize(
    ("hf", "architecture"), [("qwen3_5", "qwen35"), ("qwen3_next", "qwen3next")]
)
def test_a_quantised_checkpoint(tmp_path: Path, hf: str, architecture: str, rule: str):
    """From the directory to the file to the layer, and operator by operator against float32."""
    make_checkpoint(tmp_path / "hf", THRICE, hf)
    checkpoint = gdn.HFCheckpoint.open(tmp_path / "hf")
    out = tmp_path / "f.gguf"
    assert quantize_checkpoint(tmp_path / "hf", None, out, rule=rule) == (0, 1, 2)
    file = GGUFFile.open(out)
    assert (file.cfg, file.architecture) == (checkpoint.cfg, architecture)
    assert file.layer_types == checkpoint.layer_types
    original = checkpoint.layer(2)
    expected = {name: gdn.quantize_q4(getattr(original, name), rule) for name in LARGE}
    params = file.layer(2)
    assert_same_bits(params, dataclasses.replace(original, **expected))
    floats = {name: gdn.dequantize(w) for name, w in expected.items()}
    plain = dataclasses.replace(original, **floats)
    ours = theirs = gdn.init_state(file.cfg)
    for x in jnp.asarray(draw_inputs(file.cfg, 4, seed=5)):
        _, ours, trace = tools.trace_step(params, ours, x[None], file.cfg)
        _, theirs, reference = tools.trace_step(plain, theirs, x[None], file.cfg)
        for name in reference:
            assert_close(trace[name], reference[name], 5e-6, name)


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(tmp_path: Path):
    make_checkpoint(tmp_path / "hf", NARROW, "qwen3_5")
    make_checkpoint(tmp_path / "odd", gdn.GDNConfig(48, 2, 4, 8, 32), "qwen3_5")
    make_checkpoint(tmp_path / "good", EQUAL, "qwen3_5")
    out = tmp_path / "f.gguf"
    for directory, layers, rule, said in (
        ("hf", None, "q4_0", "qwen35 tiles the value heads"),
        ("odd", None, "q4_0", "in_proj_qkv has D = 48 columns; int4 needs a multiple of 32"),
        ("good", (0, 3), "q4_0", "layer 3 is a full_attention layer"),
        ("good", (0, 4), "q4_0", "layer is 4; needed 0 to 3"),
        ("good", (), "q4_0", "no layers to quantise"),
        ("good", None, "q5", "no rule 'q5'"),
    ):
        assert_refused(
            lambda d=directory, n=layers, r=rule: quantize_checkpoint(tmp_path / d, n, out, rule=r),
            said,
        )
    assert not out.exists()


def test_a_scale_beyond_float16_names_layer_and_projection(tmp_path: Path):
    from tests.made_checkpoint import stored_layer, write_layers

    make_checkpoint(tmp_path / "hf", EQUAL, "qwen3_5")
    weights = draw_weights(EQUAL, 0)
    weights["in_proj_z"][3, 4] = 1e6
    write_layers(tmp_path / "hf", {1: stored_layer(weights, EQUAL, "qwen3_5")})
    assert_refused(
        lambda: quantize_checkpoint(tmp_path / "hf", (1,), tmp_path / "f.gguf"),
        "layer 1, in_proj_z: quantize_q4: row 3, group 0",
        error=gdn.QuantizationError,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_the_command_quantises(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "hf", EQUAL, "qwen3_5")
    out = str(tmp_path / "f.gguf")
    where = ["quantize", "--checkpoint", str(tmp_path / "hf"), "--out", out]
    assert run(*where, "--layers", "2,0-1", "--rule", "mse") == 0
    assert f"{out}: 3 layers" in capsys.readouterr().out
    expected = gdn.quantize_q4(gdn.load_hf_layer(tmp_path / "hf", 1).in_proj_z, "mse")
    assert_same_bits(gdn.load_gguf_layer(out, 1).in_proj_z, expected)
    report = tmp_path / "r.json"
    assert run(*where, "--layers", "1", "--json", str(report)) == 0
    size = Path(out).stat().st_size
    wanted = {"file": out, "bytes": size, "layers": [1], "rule": "q4_0"}
    assert json.loads(report.read_text(encoding="utf-8")) == wanted
    assert GGUFFile.open(out).linear_layers == (1,)
    assert run(*where) == 0
    assert GGUFFile.open(out).linear_layers == (0, 1, 2)
    for layers, said in (
        ("0,3", "layer 3 is a full_attention layer"),
        ("0-", "'0-'"),
        ("2-1", "like 0,1,4-6 or all"),
    ):
        assert run(*where, "--layers", layers) == 2
        assert said in capsys.readouterr().err
