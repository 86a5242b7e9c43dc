"""The bench command refuses what it cannot do, and ends in time."""

import importlib.util
import json
from pathlib import Path

import pytest

from gdn_jax.bench import ceilings
from tests.bench.test_suites import run


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch", "1,x"],
        ["--batch", "0"],
        ["--batch", ""],
        ["--tokens", "63"],
        ["--tokens", "131073"],
        ["--tokens", "4096,"],
        ["--backend", "triton"],
        ["--suite", "attention"],
        ["--time-limit", "-1"],
        ["--repetitions", "0"],
        ["--backend", "pallas", "--suite", "int4"],
        ["--backend", "xla", "--suite", "middle"],
        ["--suite", "peer"],
        ["--backend", "pallas", "--suite", "prefill"],
        ["--json", "/no/such/place/file.json"],
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_CPU_BYTES", 1 << 16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(*arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    (line,) = [
        line
        for line in streams.err.splitlines()
        if not line.startswith(("copy (", "matrix product ("))
    ]
    assert line.startswith("gdn-jax: ")


def test_the_time_limit_of_the_command_lists_every_row(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ("--suite", "int4", "--suite", "delta", "--batch", "1", "--time-limit", "0")
    assert run(*options, "--json", str(file)) == 0
    data = json.loads(file.read_text())
    assert data["bench"] == []
    assert len(data["not_run"]) == 8
