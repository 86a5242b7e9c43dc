"""GGUF files: the conventions of others undone, and files written here."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.checkpoints.gguf_reader import GGUFFile
from gdn_jax.layer.params import LARGE
from gdn_jax.verify.draw import draw_inputs, draw_weights
from tests.support import tools
from tests.support.made_gguf import (
    EQUAL,
    LAYER,
    THRICE,
    TWICE,
    Type,
    block,
    drawn,
    layer_tensors,
    made,
    metadata,
    stored_values,
    to_params,
    write,
)
from tests.support.tools import MAX_REL, assert_close, assert_same_bits

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
