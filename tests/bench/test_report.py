"""What is made of a bench result: the page with its roofline, and README's tables."""

import copy
import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gdn_jax.bench import render as terminal
from gdn_jax.bench.roofline import PLOTS, roofline
from gdn_jax.bench.rows import COPIES, TimedCheck, copy_check, ratios, row
from gdn_jax.bench.slope import Timing
from gdn_jax.bench.workload import Workload
from gdn_jax.report.html import render_html
from gdn_jax.report.record import Check, Report
from gdn_jax.report.render import console

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT: dict[str, Any] = {
    "versions": {"jax": "0.11.2"},
    "device": "NVIDIA H200",
    "commit": "0123456789abcdef",
    "date": "2026-11-30T00:00:00+00:00",
}


def result(us: dict[tuple[str, str, int], float], date: str = "2026-11-30") -> Report:
    """A report with these times by kernel, backend and batch; 10 MB and 40 MFLOP a row."""
    settings = {"layer": "tiny", "batches": "1, 8", "repetitions": 7}
    report = Report(ENVIRONMENT | {"date": date}, settings)
    second = Timing(1.0, 1.0, 1.0, 7)
    report.checks.append(copy_check(4 << 30, dataclasses.replace(second, median=1e-3), 0))
    report.checks.append(copy_check(4 << 30, second, 0, "copy_blocking_gbps"))
    report.checks[1] = dataclasses.replace(report.checks[1], value=4000.0)
    rows = report.tables.setdefault("bench", [])
    for (kernel, backend, batch), time in us.items():
        workload = Workload(
            kernel, backend, "4x8", batch, 10**7, 4 * 10**7, 1, lambda: pytest.fail("made")
        )
        timing = Timing(time * 1e-6, time * 0.9e-6, time * 1.1e-6, 7)
        error = 1e-7 if time else math.inf
        done = TimedCheck.of(workload, error, "to float64", timing, report.checks[0].value)
        report.checks.append(done)
        rows.append(row(workload, done, report.checks[1].value))
    report.tables["ratios"] = ratios(rows)
    report.tables["not_run"] = [{"id": "bench.middle_pallas.4x8_b1", "reason": "none yet"}]
    return report


TIMES = {
    ("stream", "pallas", 1): 4.0,
    ("int4", "pallas", 1): 5.0,
    ("int4", "xla", 1): 20.0,
    ("int4", "pallas", 8): 10.0,
}


def test_marks_lie_where_the_rows_say() -> None:
    rows = result(TIMES).tables["bench"]
    panel = roofline(rows).axes[0]
    lines = {str(line.get_label()): line for line in panel.lines}
    assert list(lines["pallas, 4x8"].get_ydata()) == pytest.approx([8000.0, 4000.0])  # pyright: ignore[reportArgumentType]
    assert list(lines["xla, 4x8"].get_xdata()) == [4.0]  # pyright: ignore[reportArgumentType]
    (roof,) = (line for label, line in lines.items() if label.startswith("copy"))
    for x, y in zip(roof.get_xdata(), roof.get_ydata(), strict=True):  # pyright: ignore[reportArgumentType]
        assert y / x == pytest.approx((4 << 30) / 1e6)
    assert [text.get_text() for text in panel.texts] == ["1", "8", "1"]


def test_red_rows_and_round_trips_have_no_mark() -> None:
    rows = result({("int4", "xla", 1): 0.0, ("roundtrip_host", "xla", 1): 9.0}).tables["bench"]
    assert not any(panel.get_visible() for panel in roofline(rows).axes)


def test_page_has_the_plot_the_times_and_what_was_not_run() -> None:
    data = result(TIMES).as_dict()
    page = render_html(data, title="bench", plots=PLOTS)
    assert page.count("<svg") == 1
    for heading in ("Roofline", "Times", "Ratios", "Not run"):
        assert f">{heading}</h2>" in page
    assert "none yet" in page
    assert page == render_html(copy.deepcopy(data), title="bench", plots=PLOTS)


def test_terminal_has_times_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.render(result({**TIMES, ("int4", "xla", 8): 0.0}), console())
    out = capsys.readouterr().out
    assert re.search(r"pallas +1\.0e-07 +ok +5\.00 +±0\.50 +10\.00 .* 80\.0% +4\.00", out)
    assert re.search(r"xla +inf +FAIL +– +– +10\.00 +– +–", out)
    assert "not run, none yet: middle_pallas.4x8, B = 1" in out
    assert "FAIL: 6 of 7 checks hold" in out


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measured", ROOT / "docs" / "measured.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_times_are_the_newest_with_the_ratios_of_their_own_run(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    result(TIMES).write_json(folder / "bench-b.json")
    newer = result({("int4", "pallas", 1): 4.0}, "2026-12-01")
    newer.write_json(folder / "bench-a.json")
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    text = measured.bench_table()
    assert "of the same run: 4295 GB/s, with each call waited for 4000; the card 4800." in text
    assert "| int4 | 4x8 | 1 | pallas | 4.00 | 0.40 | 2500 | 58% | 62% | 52% | – | – | – |" in text
    assert "| 8 | pallas | 10.00 | 1.00 | 1000 | 23% | 25% | 21% | 40% | – | – |" in text
    (folder / "bench-a.json").unlink()
    assert "| 5.00 | 0.50 | 2000 | 47% | 50% | 42% | 80% | 4.00 | – |" in measured.bench_table()
    red = result({("int4", "pallas", 1): 0.0})
    red.write_json(folder / "bench-a.json")
    with pytest.raises(AssertionError, match="not shown"):
        measured.bench_table()


def test_models_and_published_times_have_tables_of_their_own(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = result({("model_decode", "pallas", 32): 5000.0, ("chunk", "pallas", 1): 780.0})
    report.settings["tokens"] = "8192, 32768"
    step, rule = report.tables["bench"]
    step |= {"tokens_a_second": 6400.0}
    rule |= {"shape": "48x128x128_t8192"}
    prompt = step | {"id": "p", "kernel": "model_prefill", "shape": "d64_t8", "matrix": True}
    prompt |= {"us": 2e6, "us_low": 2e6, "us_high": 2e6, "tokens_a_second": 4096.0}
    report.tables["bench"].append(prompt | {"share_matrix": 0.5})
    slower = {"id": rule["id"], "to": "c", "us": 780.0, "us_to": 900.0}
    report.tables["ratios"] = [slower | {"backend": "jla", "ratio": 1.1538}]
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    report.write_json(folder / "bench-a.json")
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    text = measured.bench_table()
    assert "| than fla | than jla | error |" in text
    assert "| chunk | 48x128x128_t8192 | 1 | pallas | 780.00 |" in text
    assert "| – | – | 1.15 | 1.0e-07 |" in text
    assert "| a step | 4x8 | 32 | pallas | 5.00 | 0.50 | 6400.0 | 0% | – | 1.0e-07 |" in text
    said = "| a prompt to its first token | d64_t8 | 32 | pallas | 2000.00 | 0.00 | 4096.0 |"
    assert f"{said} – | 50% | 1.0e-07 |" in text
    assert "| FlashInfer, published, not measured here | 8192 | 780 | 393 | 1.98 |" in text
    assert "| FlashQLA, published, not measured here | 8192 | 780 | 410 | 1.90 |" in text
    assert "| 32768 |" not in text
    assert "| model_" not in text
    other = copy.deepcopy(report)
    other.environment["device"] = "NVIDIA GeForce RTX 5090"
    other.write_json(folder / "bench-a.json")
    assert "published" not in measured.bench_table()


def test_a_load_has_a_table(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    assert "loaded and asked" not in measured.bench_table()
    answer = {"prompt_tokens": [1, 2, 3]}
    answer |= {"timings": {"prefill": 2.51, "decode": 9.0, "tokens_per_second": 7.02}}
    found = {"environment": result({}).environment, "model": "M", "weights": "q4", "load_s": 33.71}
    found |= {"sampling": {"context": 8, "max_new_tokens": 4}, "results": [answer]}
    found |= {"load_host_peak_bytes": 6.44e9, "device_peak_bytes": 1.993e10}
    (folder / "generate-a.json").write_text(json.dumps(found))
    text = measured.bench_table()
    assert "| M, q4, NVIDIA H200 | 3 of 8 | 33.7 | 6.4 | 19.93 | 2.5 | 7.0 |" in text
    assert "(docs/results/generate-a.json): 4 new tokens, JAX " in text


def test_reference_stands_beside_the_times(measured: ModuleType) -> None:
    text = measured.bench_table()
    assert "| – | 964 | 54% |" in text
    assert "| 156 | 468 | 26% |" in text


def test_every_device_and_backend_has_a_column(measured: ModuleType) -> None:
    head = measured.table().splitlines()[0]
    assert head == ("| check | AMD EPYC, xla | NVIDIA H200, pallas | NVIDIA H200, xla | unit |")


def test_every_step_of_the_ladder_is_whole(measured: ModuleType) -> None:
    entries = measured.ladder()
    assert len(entries) >= 10
    for entry in entries:
        assert tuple(entry) == measured.LADDER_FIELDS
        assert all(isinstance(value, str) and value for value in entry.values()), entry
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"])
    assert len({(e["kernel"], e["version"]) for e in entries}) == len(entries)
    for entry in entries:
        assert f"| {entry['version']} |" in measured.ladder_page()


def test_recorded_results_have_no_time_behind_a_red_check() -> None:
    for file in (ROOT / "docs" / "results").glob("bench-*.json"):
        data = json.loads(file.read_text())
        assert data["ok"]
        assert [check["id"] for check in data["checks"][:2]] == list(COPIES)
        greens = {check["id"] for check in data["checks"] if check["ok"]}
        assert {line["id"] for line in data["bench"] if line["us"]} <= greens


def test_terminal_has_tokens_a_second_and_checks_of_several_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = result({("slots_step_q4", "pallas", batch): 20.0 * batch for batch in (1, 8)})
    plain = Workload("slots_step_q4", "pallas", "4x8", 8, 10**7, 1, 1, lambda: pytest.fail("made"))
    timing = Timing(2e-5, 2e-5, 2e-5, 7)
    done = TimedCheck.of(plain, 0.0, "", timing)
    report.tables["bench"][1] = row(dataclasses.replace(plain, tokens=8), done)
    said = Check("bench.slots_batch8", True, 1.25, 1.35, "of one", "by hand", "", "")
    report.checks.append(said)
    terminal.render(report, console())
    out = capsys.readouterr().out
    assert re.search(r"tokens/s a layer", out)
    assert re.search(r" 8 +pallas .* 400000 *$", out, re.MULTILINE)
    assert "ok  bench.slots_batch8: 1.250 of one, limit 1.35; by hand" in out
