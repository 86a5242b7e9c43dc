"""Oracle files: what comes back, what is refused, and that the shipped ones agree with float64."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from gdn_jax import PRESETS, OracleError, oracle
from gdn_jax.report.metrics import distance
from gdn_jax.verify.draw import draw_inputs, draw_weights, weights_sha256
from gdn_jax.verify.oracles import oracle_file
from gdn_jax.verify.oracles.oracle_file import Oracle, load_oracle, redraw_weights, shipped_oracle

CFG = PRESETS["tiny"]
SHIPPED = {"tiny": 1e-6, "tiny-wide": 1e-6, "qwen3-next-80b-a3b": 3e-6, "qwen3.5-27b": 5e-6}
"""Limit on max_rel of any operator: twice what was measured. Float32 sums over D = 5120 products
are 1e-6 off by themselves, and the gated norm enlarges that in the heads whose output is small."""


def made(tokens: int = 3, seed: int = 4) -> tuple[Oracle, dict[str, np.ndarray]]:
    """An oracle as a transformers run would give it, from float64, and the weights."""
    weights, xs = draw_weights(CFG, seed), draw_inputs(CFG, tokens, seed)
    trace = {n: x.astype(np.float32) for n, x in oracle.layer_trace(weights, CFG, xs).items()}
    final = trace | {name: trace[name][-1] for name in ("S", "HIST")}
    provenance = {"draw": "pcg64-sum4 v1", "torch": "2.13.0"}
    one_shot = {"OUT": trace["OUT"] + np.float32(1e-6)}
    sha256 = weights_sha256(weights)
    return Oracle(CFG, "qwen3_5", seed, xs, final, one_shot, provenance, sha256), weights


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "o.safetensors"
    oracle_file.save_oracle(path, made()[0])
    return path


def parts(path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return load_file(path), file.metadata()


def rewrite(path, tensors, metadata) -> None:
    """The file with other contents under a right checksum."""
    metadata["payload_sha256"] = oracle_file._payload_sha256(tensors, metadata)
    save_file(tensors, path, metadata)


def refused(path, match, cfg=None) -> None:
    with pytest.raises(OracleError, match=match) as caught:
        load_oracle(path, cfg)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_round_trip(path):
    written, back = made()[0], load_oracle(path, CFG)
    for field in dataclasses.fields(Oracle):
        a, b = getattr(written, field.name), getattr(back, field.name)
        if field.name in ("trace", "one_shot"):
            assert list(a) == list(b)
            assert all(np.array_equal(a[n], b[n]) and b[n].dtype == np.float32 for n in a)
        else:
            assert np.array_equal(a, b)


def test_missing_truncated_and_foreign_files(tmp_path, path):
    refused(tmp_path / "none.safetensors", "no such file")
    refused(tmp_path, "not a safetensors file")
    whole = path.read_bytes()
    for length in (0, 5, 200, len(whole) - 4):
        path.write_bytes(whole[:length])
        refused(path, "truncated")
    save_file({"S": np.zeros(3, np.float32)}, path)
    refused(path, "not an oracle file")


def test_every_flipped_byte_is_refused(path):
    whole = path.read_bytes()
    for place in range(3, len(whole), len(whole) // 40):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        refused(path, "truncated|not an oracle|oracle version|altered")


@pytest.mark.parametrize(
    "key", ["architecture", "config", "seed", "tokens", "weights_sha256", "torch", "payload_sha256"]
)
def test_edited_metadata_is_refused(path, key):
    tensors, metadata = parts(path)
    save_file(tensors, path, metadata | {key: metadata[key] + "1"})
    refused(path, "altered")
    del metadata[key]
    save_file(tensors, path, metadata)
    refused(path, "altered")


def test_another_version(path):
    tensors, metadata = parts(path)
    rewrite(path, tensors, metadata | {"version": "2"})
    refused(path, "version 2; needed 1")


def test_another_configuration(path):
    refused(path, "d_model=64.*needed one for GDNConfig.d_model=96", PRESETS["tiny-wide"])
    refused(path, "norm_eps", dataclasses.replace(CFG, norm_eps=1e-5))


def test_metadata_that_cannot_be_read(path):
    tensors, metadata = parts(path)
    for config in ("{", "[]", json.dumps({"d_model": 64}), metadata["config"].replace("64", "-1")):
        rewrite(path, tensors, metadata | {"config": config})
        refused(path, "metadata cannot be read")


@pytest.mark.parametrize("name", ["xs", "OUT", "S", "one_shot.OUT"])
def test_tensors_missing_misshaped_or_not_finite(path, name):
    tensors, metadata = parts(path)
    bad = tensors[name].copy()
    bad[1, ..., 2] = np.nan
    for replacement, match in (
        ({}, f"no tensor {name}"),
        ({name: tensors[name], "Y": bad}, "unknown tensor Y"),
        ({name: tensors[name][..., :-1].copy()}, "needed"),
        ({name: tensors[name].astype(np.float64)}, "float64; needed"),
        ({name: tensors[name].astype(ml_dtypes.float8_e4m3fn)}, "float8_e4m3fn"),
        ({name: np.zeros((), np.float32)}, "needed"),
        ({name: bad}, rf"{name}\[1.* 2\] is nan"),
    ):
        rest = {n: x for n, x in tensors.items() if n != name}
        rewrite(path, rest | replacement, dict(metadata))
        refused(path, match)


def test_nothing_is_written_when_the_oracle_is_bad(tmp_path):
    good = made()[0]
    nan = good.trace | {"ON": np.full_like(good.trace["ON"], np.nan)}
    with pytest.raises(OracleError, match=r"not written: ON.* is nan"):
        oracle_file.save_oracle(tmp_path / "o", dataclasses.replace(good, trace=nan))
    with pytest.raises(OracleError, match="cannot be written"):
        oracle_file.save_oracle(tmp_path / "no" / "o", good)
    assert not list(tmp_path.iterdir())


def test_redraw(path):
    weights = redraw_weights(load_oracle(path))
    assert all(np.array_equal(weights[n], x) for n, x in made()[1].items())
    for change, match in (
        ({"seed": 5}, "seed 5 draws weights"),
        ({"seed": None}, "from seed None"),
        ({"provenance": {"draw": "dice"}}, "drawn by dice"),
    ):
        with pytest.raises(OracleError, match=match):
            redraw_weights(dataclasses.replace(made()[0], **change))


@pytest.mark.slow
@pytest.mark.parametrize("preset", SHIPPED)
def test_shipped_oracles_agree_with_float64(preset):
    path = shipped_oracle(preset)
    assert path is not None
    file = load_oracle(path, PRESETS[preset])
    weights = redraw_weights(file)
    assert file.architecture == oracle_file.architecture_of(preset)
    assert file.seed is not None
    assert np.array_equal(file.xs, draw_inputs(file.cfg, len(file.xs), file.seed))
    assert len(file.xs) == (70 if preset.startswith("tiny") else 5)

    exact = oracle.layer_trace(weights, file.cfg, file.xs)
    exact |= {name: exact[name][-1] for name in ("S", "HIST")}
    worst = {name: distance(x, exact[name]).max_rel for name, x in file.trace.items()}
    worst["one-shot"] = distance(file.one_shot["OUT"], exact["OUT"]).max_rel / 2
    assert worst == {name: pytest.approx(0, abs=SHIPPED[preset]) for name in worst}
    assert len(worst) == 15
    assert not np.array_equal(file.one_shot["OUT"], file.trace["OUT"])
    apart = distance(file.one_shot["OUT"], file.trace["OUT"]).max_rel
    assert file.provenance["one_shot_OUT_max_rel"] == f"{apart:.3e}"


def test_shipped_files_are_small_and_name_no_path():
    paths = [shipped_oracle(preset) for preset in SHIPPED]
    assert sum(path.stat().st_size for path in paths if path) <= 8_000_000
    for path in paths:
        assert path
        assert not any("/" in text for text in parts(path)[1].values())
    assert shipped_oracle("qwen3.5-9b") is None
    assert shipped_oracle("../data/tiny") is None
