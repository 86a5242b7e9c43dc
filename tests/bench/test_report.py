"""What is made of a bench result: the page with its roofline, and what a terminal shows."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
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
