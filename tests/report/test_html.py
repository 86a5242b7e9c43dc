"""The HTML report, on data made up here: whole, self-contained, escaped, the same twice."""

import copy
import html.parser
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gdn_jax.errors import GDNError
from gdn_jax.report.html import ReportExtraError, render_html, require_report_extra, write_html
from gdn_jax.report.plots import PLOTS
from gdn_jax.report.svg import STYLES
from tests.support.made_up import OPERATORS, PAIRS, Q4_PAIRS, report_data

HOSTILE = "<script>alert(1)</script> $\\frac{$ & \"x' --> ]]>"
VOID = {"meta", "br"}
HEAD = ("ok", "environment", "settings", "checks")


class Page(html.parser.HTMLParser):
    """Tags, attributes and tables of a page; fails on an element left open or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.headings: list[str] = []
        self.under: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self.headings.append("")
        elif tag == "table":
            self.tables.append([])
            self.under.append(len(self.headings) - 1)
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        elif "h2" in self.open:
            self.headings[-1] += data

    def table(self, *header: str, under: str = "") -> list[list[str]]:
        """The rows of the one table that begins with these columns, spaces trimmed.

        ``under`` is part of its heading.
        """
        (found,) = [
            t
            for t, heading in zip(self.tables, self.under, strict=True)
            if tuple(t[0][: len(header)]) == header and under in self.headings[heading]
        ]
        return [[cell.strip() for cell in row] for row in found[1:]]


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(part) for part in re.findall(r"<svg.*?</svg>", text, re.S)]


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return report_data(steps=12)


@pytest.fixture(scope="module")
def text(data: dict[str, Any]) -> str:
    return render_html(data, title="gdn-jax verify")


def test_page_and_plots_are_well_formed(text: str) -> None:
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.tags[0] == ("html", {"lang": "en"})
    assert len(svgs(text)) == len(PLOTS)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
    assert links
    assert {a or b for a, b in links} <= set(ids)


def test_neutral_parts_of_plots_have_the_colour_of_the_page(text: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    used = set(re.findall(r"(?:fill|stroke): ?([^;\"]+)", drawn))
    assert "currentColor" in used
    assert used <= {"none", "currentColor"} | {color for color, _, _ in STYLES}


def test_page_is_self_contained(text: str) -> None:
    for tag, attrs in Page(text).tags:
        assert tag not in ("script", "link", "iframe", "img", "object", "base")
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "action"):
                assert (value or "").startswith("#")
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def cells(row: dict[str, Any]) -> Iterator[tuple[Any, float]]:
    """The values that a row shows, each with its relative precision."""
    for key, value in row.items():
        yield value, 5e-4
        if key == "bytes":
            yield value / 2**20, 5e-3


def assert_shown(cell: str, value: Any, precision: float = 5e-4) -> None:
    if value is None:
        assert cell == "–"
    elif isinstance(value, bool):
        assert ("pass" if value else "FAIL") in cell
    elif isinstance(value, str):
        assert cell == value
    else:
        assert float(cell.replace(",", "")) == pytest.approx(value, rel=precision)


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("state", "Size of the state"),
        ("tokens", "Token by token"),
        ("operators", "Operator by operator"),
        ("decay", "Decay and state by head"),
        ("drift", "Drift over a long run"),
        ("round_trip", "Cost of a host round trip"),
        ("q4_tokens", "int4: token by token"),
        ("q4_operators", "int4: operator by operator"),
        ("q4_groups", "int4: group size and rule"),
        ("q4_drift", "int4: the cost over a long run"),
    ],
)
def test_every_table_value_is_in_its_cell(
    data: dict[str, Any], text: str, name: str, heading: str
) -> None:
    rows = data[name]
    header = [c for key in rows[0] for c in ([key, "MiB"] if key == "bytes" else [key])]
    shown = Page(text).table(*header, under=heading)
    assert len(shown) == len(rows)
    for line, row in zip(shown, rows, strict=True):
        for cell, (value, precision) in zip(line, cells(row), strict=True):
            assert_shown(cell, value, precision)


def test_whole_stack_of_the_27b_layer_reads_149_6_mib(text: str) -> None:
    assert Page(text).table("part", "shape", "bytes")[-1][2:] == ["156,893,184", "149.6"]


def test_projections_close_with_their_sizes_together(data: dict[str, Any], text: str) -> None:
    shown = Page(text).table(*data["projections"][0])
    for line, row in zip(shown[:-1], data["projections"], strict=True):
        for cell, value in zip(line, row.values(), strict=True):
            assert_shown(cell, value)
    assert shown[-1] == ["together", "–", "–", "–", "440", "61.88", "7.111"]


def test_every_check_and_fact_appears(data: dict[str, Any], text: str) -> None:
    rows = Page(text).table("check", "verdict")
    for row, check in zip(rows, data["checks"], strict=True):
        assert row[0] == check["id"] + check["detail"]
        assert row[1] == "✓ pass"
        assert_shown(row[2], check["value"])
        assert_shown(row[3], check["limit"])
        assert row[4:] == [check["unit"], check["shows"], check["shows_not"]]
    for fact in ("<dd>CPU 0, CPU 1</dd>", "<dd>20250101</dd>", "<dd>no</dd>", "<dd>–</dd>"):
        assert fact in text
    assert "all 7 checks hold" in text


@pytest.mark.parametrize(("name", "pairs"), [("operators", PAIRS), ("q4_operators", Q4_PAIRS)])
def test_operator_summary_takes_first_and_last_token(
    data: dict[str, Any], text: str, name: str, pairs: tuple[str, ...]
) -> None:
    (grid,) = [table for table in Page(text).tables if table[0][1:] == list(pairs)]
    lines = {line[0]: line[1:] for line in grid[2:]}
    assert tuple(lines) == OPERATORS
    for operator in ("XC", "ON"):
        rows = [r for r in data[name] if (r["operator"], r["pair"]) == (operator, pairs[1])]
        cell = lines[operator][4:8]
        assert_shown(cell[0], rows[0]["max_rel"])
        assert_shown(cell[1], rows[0]["rms_rel"])
        assert_shown(cell[2], rows[-1]["rms_rel"])
        if operator == "XC":
            assert cell[3] == "–"
        else:
            worst = max(rows, key=lambda r: r["worst_head_rel"])
            head, value = cell[3].split(": ")
            assert int(head) == worst["worst_head"]
            assert_shown(value, worst["worst_head_rel"])


def test_failing_check_is_rendered_as_failed(data: dict[str, Any]) -> None:
    bad = copy.deepcopy({key: data[key] for key in (*HEAD, "tokens")})
    bad["ok"] = bad["checks"][1]["ok"] = bad["tokens"][2]["ok"] = False
    bad["checks"][1]["value"] = "inf"
    text = render_html(bad, title="t")
    page = Page(text)
    row = page.table("check", "verdict")[1]
    assert row[:3] == ["f32.float64" + bad["checks"][1]["detail"], "✗ FAIL", "inf"]
    assert sum("FAIL" in cell for line in page.table("check", "verdict") for cell in line) == 1
    assert page.table("pair", "token", "max_abs_err")[2][-1] == "✗ FAIL"
    assert " ".join(text.split()).count("1 of 7 checks fails: f32.float64.") == 1
    assert "checks hold" not in text
    assert ("p", {"class": "verdict fail"}) in page.tags
    assert "no check ran" in render_html(
        {"ok": False, "environment": {}, "settings": {}, "checks": []}, title="t"
    )


def test_hostile_strings_are_escaped_everywhere(data: dict[str, Any]) -> None:
    bad = {key: copy.deepcopy(data[key]) for key in HEAD}
    bad["environment"][HOSTILE] = HOSTILE
    bad["checks"][0] |= dict.fromkeys(("id", "detail", "unit", "shows", "shows_not"), HOSTILE)
    bad["operators"] = [row | {"pair": HOSTILE} for row in data["operators"][:1]]
    bad["tokens"] = [row | {"pair": HOSTILE} for row in data["tokens"][:1]]
    bad[HOSTILE] = [{HOSTILE: HOSTILE}]
    text = render_html(bad, title=HOSTILE)
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert page.table("check", "verdict")[0] == [
        *(HOSTILE * 2, "✓ pass", "9.100e-07", "1e-04"),
        *(HOSTILE,) * 3,
    ]
    assert page.table(HOSTILE) == [[HOSTILE]]
    assert any(HOSTILE in "".join(tree.itertext()) for tree in svgs(text))


def test_absent_and_empty_tables_are_fine_and_unknown_ones_are_kept(data: dict[str, Any]) -> None:
    head = {key: data[key] for key in HEAD}
    text = render_html(head | {"drift": [], "tokens": []}, title="t")
    assert "<svg" not in text
    assert len(Page(text).tables) == 1
    later = {"bench_rows": [{"kernel": "gemv", "us": 1234567.0}, {"gbps": 0.0312}], "copy": 812.5}
    text = render_html(head | later, title="t")
    assert "<h2>Further values</h2>" in text
    assert "<dd>812.5</dd>" in text
    assert Page(text).table("kernel", "us", "gbps") == [
        ["gemv", "1,234,567", "–"],
        ["–", "–", "3.120e-02"],
    ]


def test_two_renders_are_equal(data: dict[str, Any], text: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "svg.hashsalt": "other", "axes.grid": False}):
        assert render_html(copy.deepcopy(data), title="gdn-jax verify") == text


def test_file_is_written_whole_or_not_at_all(
    data: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_html(path, data, "gdn-jax verify")
    assert path.read_text("utf-8") == text
    with pytest.raises(KeyError):
        write_html(path, {}, "t")
    assert path.read_text("utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_missing_extra_is_one_line(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    require_report_extra()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (require_report_extra, lambda: render_html(data, title="t")):
        with pytest.raises(ReportExtraError) as caught:
            call()
        assert isinstance(caught.value, GDNError)
        needed = "the HTML report needs matplotlib: pip install 'gdn-jax[report]'"
        assert str(caught.value) == needed
