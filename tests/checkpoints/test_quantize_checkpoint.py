"""From a Hugging Face directory to an int4 GGUF file, as a function and as a command."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

import gdn_jax as gdn
from gdn_jax.checkpoints.gguf_reader import GGUFFile
from gdn_jax.checkpoints.gguf_writer import quantize_checkpoint
from gdn_jax.cli.main import main
from gdn_jax.layer.params import LARGE
from gdn_jax.verify.draw import draw_inputs, draw_weights
from tests.support import tools
from tests.support.made_checkpoint import make_checkpoint, stored_layer, write_layers
from tests.support.made_gguf import EQUAL, NARROW, THRICE
from tests.support.tools import assert_close, assert_refused, assert_same_bits


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
