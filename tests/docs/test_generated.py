"""The generated pages are those that the records, the catalogue and the commands give."""

import json
import re
from pathlib import Path

import pytest

from docs.generate.ladder import FIELDS, ladder
from docs.generate.markdown import MOST_COLUMNS, NONE, table
from docs.generate.pages import PAGES
from docs.generate.records import ROOT, records
from gdn_jax.verify.catalogue import CATALOGUE

BY_HAND = [
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if path.relative_to(ROOT).as_posix() not in PAGES
]
LINK = re.compile(r"\[[^\]\n]*\]\(([^)#\s]+)")


@pytest.mark.parametrize("path", PAGES)
def test_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), "run python -m docs.generate"


@pytest.mark.parametrize("path", PAGES)
def test_no_table_is_wide_or_mostly_empty(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        assert len({len(row) for row in rows}) == 1, block
        assert len(rows[0]) <= MOST_COLUMNS, block
        cells = [cell.strip() for row in rows[2:] for cell in row]
        assert 2 * cells.count(NONE) < len(cells), block
        for column in zip(*rows[2:], strict=True):
            assert len(rows) < 5 or {cell.strip() for cell in column} != {NONE}, block


def test_a_table_that_is_too_wide_is_refused() -> None:
    with pytest.raises(AssertionError, match="split"):
        table(["x"] * 9, [["1"] * 9])


@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_pages_by_hand_lead_somewhere(path: Path) -> None:
    _check_links(path)


@pytest.mark.parametrize("path", PAGES)
def test_links_of_generated_pages_lead_somewhere(path: str) -> None:
    _check_links(ROOT / path)


def _check_links(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_readme_is_a_first_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_recorded_check_and_every_check_of_the_catalogue_is_shown() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for record in records("verify"):
        for check in record.data["checks"]:
            assert f"| `{check['id']}` |" in results
    checks = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")
    assert all(f"| `{id_}` |" in checks for id_ in CATALOGUE)


def test_every_step_of_the_ladder_is_whole() -> None:
    entries = ladder()
    page = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8")
    assert len(entries) >= 10
    for entry in entries:
        assert tuple(entry) == FIELDS
        assert all(isinstance(value, str) and value for value in entry.values()), entry
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"])
        assert f"| {entry['version']} |" in page
    assert len({(entry["kernel"], entry["version"]) for entry in entries}) == len(entries)


def test_a_red_result_is_not_shown(tmp_path: Path) -> None:
    red = {"ok": False, "environment": {"date": "2026-12-01"}}
    (tmp_path / "verify-a.json").write_text(json.dumps(red))
    with pytest.raises(AssertionError, match="not shown"):
        records("verify", tmp_path)
