"""The report on the terminal: the tables of the int4 tier and what they hold."""

import io
import re

import pytest
from rich.console import Console

from gdn_jax.report.numbers import number
from gdn_jax.report.record import Report
from gdn_jax.report.render import render
from tests.support.made_up import OPERATORS, Q4_PAIRS, made_up_report


@pytest.fixture(scope="module")
def report() -> Report:
    return made_up_report()


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    file = io.StringIO()
    render(report, Console(file=file, width=100))
    return file.getvalue()


def table(text: str, title: str) -> list[list[str]]:
    """Header and rows of the table under a title."""
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index(title) + 2
    block = lines[start : lines.index("", start)]
    return [re.split(r" {2,}", line) for line in block if not line.startswith("─")]


def test_projections_close_with_their_sizes_together(report: Report, text: str) -> None:
    header, *lines, together = table(
        text, "Projections alone, int4 to float64 with the original weights"
    )
    assert header[3:] == ["rms_rel, q8 activations", "float32 MiB", "int4 MiB", "ratio"]
    for line, row in zip(lines, report.tables["projections"], strict=True):
        name, largest, rms, rms_q8, full, small, ratio = row.values()
        errors = [number(x) for x in (largest, rms, rms_q8)]
        assert line == [name, *errors, f"{full:.1f}", f"{small:.1f}", f"{ratio:.2f}"]
    assert together == ["together", "–", "–", "–", "440.0", "61.9", "7.11"]


def test_int4_operators_are_a_table_a_pair(report: Report, text: str) -> None:
    for pair in Q4_PAIRS:
        header, *lines = table(text, f"Operators, {pair}, at tokens 0 and 4")
        assert header[1:3] == ["max_rel at 0", "rms_rel at 0"]
        assert tuple(line[0] for line in lines) == OPERATORS
        rows = [row for row in report.tables["q4_operators"] if row["pair"] == pair]
        for line in lines:
            first, *_, last = (row for row in rows if row["operator"] == line[0])
            wanted = [row[key] for row in (first, last) for key in ("max_rel", "rms_rel")]
            assert line[1:5] == [number(x) for x in wanted]


def test_int4_tokens_groups_and_drift(report: Report, text: str) -> None:
    _, *lines = table(text, "The int4 layer's output to the float32 layer's, original weights")
    assert [line[4] for line in lines] == [number(r["max_rel"]) for r in report.tables["q4_tokens"]]

    header, *lines = table(text, "in_proj_qkv, stored to original: rms_rel")
    assert header == ["rule", "16 (5 bits)", "32 (4.5 bits)", "64 (4.25 bits)", "128 (4.125 bits)"]
    rows = report.tables["q4_groups"]
    for rule, *errors in lines:
        assert errors == [number(row["rms_rel"]) for row in rows if row["rule"] == rule]
    assert [line[0] for line in lines] == ["q4_0", "mse"]

    header, *lines = table(text, "int4 to float32, small layer, 512 tokens")
    assert header == ["token", "max_rel", "rms_rel", "S_rms_rel"]
    assert [line[0] for line in lines] == ["0", "1", "8", "64", "511"]
    for token, *errors in lines:
        row = report.tables["q4_drift"][int(token)]
        assert errors == [number(row[key]) for key in header[1:]]
