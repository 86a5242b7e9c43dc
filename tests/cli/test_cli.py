"""The command line: exit statuses, one-line errors, and the shape of its results."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from gdn_jax import PRESETS
from gdn_jax._core.environment import environment
from gdn_jax.cli.main import main
from gdn_jax.layer.trace import trace_shapes

VERIFY = ["verify", "--preset", "tiny", "--layers", "3"]
Q4_IDS = {
    "f16.convert",
    "q4.kernel_vs_dequantized",
    "q4.magnitude_gate",
    "q4.readback",
    "q4.cross_layer",
    "q4.reset_replay",
    "q4.repeat",
    "q4.host_vs_device",
    "q4.residency",
}
F32_IDS = {
    "f32.oracle",
    "f32.float64",
    "f32.operators",
    "f32.heads",
    "f32.readback",
    "f32.cross_layer",
    "f32.reset_replay",
    "f32.repeat",
    "f32.host_vs_device",
    "f32.residency",
    "f32.drift512",
}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, str]:
    """The JSON, the page and the terminal of one run, with more tokens than the oracle has."""
    folder = tmp_path_factory.mktemp("verify")
    files = ["--json", str(folder / "r.json"), "--html", str(folder / "r.html")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run(*VERIFY, "--tokens", "72", *files) == 0
    result = json.loads((folder / "r.json").read_text())
    return result, (folder / "r.html").read_text(), printed.getvalue()


def test_verify_writes_every_check_and_table(verified: tuple[dict, str, str]) -> None:
    result, page, _ = verified
    assert result["ok"] is True
    assert {check["id"] for check in result["checks"]} == F32_IDS | Q4_IDS
    for check in result["checks"]:
        assert set(check) == {"id", "ok", "value", "limit", "unit", "detail", "shows", "shows_not"}
        assert check["value"] <= check["limit"]
        assert check["id"] in page
    assert {"versions", "device", "commit", "date"} <= set(result["environment"])
    for pair, tokens in (
        ("ours to transformers", 70),
        ("ours to float64", 72),
        ("transformers to float64", 70),
    ):
        assert [r["token"] for r in result["tokens"] if r["pair"] == pair] == list(range(tokens))
        operators = {row["operator"] for row in result["operators"] if row["pair"] == pair}
        assert operators == set(trace_shapes(PRESETS["tiny"]))
    assert len(result["drift"]) == 512
    assert result["state"][-1]["bytes"] == 3 * 4 * (4 * 16 * 8 + 3 * 96)


def test_verify_says_it_on_the_terminal(verified: tuple[dict, str, str]) -> None:
    printed = verified[2]
    for said in ("PASS: 20 of 20", "max_abs_err", "shows ", "; not ", "MiB", "OUT of 70 tokens"):
        assert said in printed
    assert all(id_ in printed for id_ in F32_IDS | Q4_IDS)


def test_oracle_none_leaves_the_check_out_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    arguments = ["--tier", "f32", "--oracle", "none", "--seed", "3", "--json", str(file)]
    assert run(*VERIFY, *arguments) == 0
    result = json.loads(file.read_text())
    assert {check["id"] for check in result["checks"]} == F32_IDS - {"f32.oracle"}
    assert "not compared" in capsys.readouterr().out


def test_a_wrong_layer_fails_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """b and a exchanged: the run ends with 1 and the report names the operator where it starts."""
    from gdn_jax.verify.layer import float32

    honest = float32.device_params

    def exchanged(weights: dict[str, np.ndarray]):
        swapped = {"in_proj_b": weights["in_proj_a"], "in_proj_a": weights["in_proj_b"]}
        return honest({**weights, **swapped})

    monkeypatch.setattr(float32, "device_params", exchanged)
    file = tmp_path / "r.json"
    assert run(*VERIFY, "--tier", "f32", "--json", str(file)) == 1
    failed = {check["id"]: check for check in json.loads(file.read_text())["checks"]}
    assert not failed["f32.oracle"]["ok"]
    assert not failed["f32.float64"]["ok"]
    assert failed["f32.operators"]["detail"].startswith("starts at B, token 0")
    assert failed["f32.cross_layer"]["ok"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "--preset", "huge"], "'huge' is not one of"),
        (["verify", "--nonsense"], "No such option"),
        (["nothing"], "No such command"),
        (["verify", "--tokens", "0"], "--tokens"),
        (["verify", "--layers", "1"], "--layers"),
        (["verify", "--layer", "3"], "--checkpoint and --layer go together"),
        (["verify", "--checkpoint", "/nowhere", "--layer", "0"], "/nowhere"),
        (["verify", "--checkpoint", "x", "--layer", "0", "--preset", "tiny"], "exclude"),
        (["verify", "--checkpoint", "x", "--layer", "0", "--oracle", "f"], "live or none"),
        (["verify", "--preset", "qwen3.5-9b"], "no oracle ships for preset qwen3.5-9b"),
        (["verify", "--preset", "tiny", "--oracle", "/no/file"], "/no/file"),
        (["verify", "--preset", "tiny", "--seed", "12345"], "needed 12345"),
        (["verify", "--preset", "tiny", "--backend", "cuda"], "no backend 'cuda'"),
        (["verify", "--preset", "tiny", "--backend", "pallas"], "no CUDA GPU"),
        (["verify", "--preset", "tiny", "--json", "/no/such/folder/r.json"], "no directory"),
        (["verify", "--preset", "tiny", "--oracle", "live", "--oracle-python", "/no/py"], "/no/py"),
        (["oracle", "export", "--preset", "tiny"], "Missing option '--out'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("gdn-jax: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert "Traceback" not in printed.err + printed.out


@pytest.mark.parametrize(
    "command",
    [[], ["verify"], ["info"], ["oracle"], ["oracle", "export"], ["generate"], ["perplexity"]],
)
def test_help_everywhere(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    assert "Usage: gdn-jax" in capsys.readouterr().out


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "info.json"
    assert run("info", "--json", str(file)) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [row["preset"] for row in found["presets"]] == list(PRESETS)
    for said in (*PRESETS, "no CUDA GPU", "cpu"):
        assert said in printed
    big = next(row for row in found["presets"] if row["preset"] == "qwen3.5-27b")
    assert big["state"] == 4 * (48 * 128 * 128 + 3 * 10240)
    assert 48 * big["state"] / 2**20 == pytest.approx(149.6, abs=0.05)


def test_environment_names_what_made_a_result() -> None:
    found = environment()
    assert {"python", "jax", "jaxlib", "numpy", "gdn-jax"} <= set(found["versions"])
    assert found["date"].endswith("+00:00")
