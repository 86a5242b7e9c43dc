"""The record of ``python -m tests.isa``: what it counts, and what a processor runs instead."""

import json
from pathlib import Path

import pytest

from tests import isa
from tests.support import margins
from tests.support.tools import assert_close


def test_a_setting_reaches_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--other")
    found = isa.Setting("AVX2", 8).environment
    assert found["XLA_FLAGS"] == "--other --xla_cpu_max_isa=AVX2"
    assert found["NPROC"] == "8"
    assert len([*isa.settings(list(isa.NEEDS), list(isa.THREADS))]) == 12


@pytest.mark.parametrize(
    ("asked", "flags", "ran"),
    [
        ("AVX512", {"sse4_2", "avx", "avx2"}, "AVX2"),
        ("AVX512", {"sse4_2", "avx", "avx2", "avx512f"}, "AVX512"),
        ("SSE4_2", {"sse4_2", "avx", "avx2", "avx512f"}, "SSE4_2"),
        ("AVX2", set(), "SSE"),
    ],
)
def test_what_the_processor_lacks_is_not_what_ran(asked: str, flags: set[str], ran: str) -> None:
    assert isa.best(asked, flags) == ran


def test_tests_are_counted_and_failures_named(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(
        '<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">'
        '<testcase classname="a" name="one"/>'
        '<testcase classname="a" name="two"><failure/></testcase>'
        '<testcase classname="a" name="three"><error/></testcase>'
        '<testcase classname="a" name="four"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert isa.counts(junit) == {"passed": 1, "failed": 2, "skipped": 1}
    assert isa.failed_tests(junit) == ["a::two", "a::three"]


def test_the_nearest_distance_of_each_test_is_kept(tmp_path: Path) -> None:
    rows = [("a[1]", 1.0, 4.0), ("a[2]", 3.0, 4.0), ("b", 1.0, 2.0), ("bits", 0.0, 0.0)]
    log = tmp_path / "log"
    log.write_text("\n".join(json.dumps({"test": t, "found": f, "limit": x}) for t, f, x in rows))
    found = isa.nearest(log)
    assert [(row["test"], row["share"]) for row in found] == [("a[2]", 0.75), ("b", 0.5)]
    assert isa.nearest(tmp_path / "none") == []


def test_a_distance_is_logged_where_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(margins, "_file", [log])
    assert_close([1.0, 2.5], [1.0, 2.0], 0.5, "far")
    with pytest.raises(AssertionError, match="near: max_rel"):
        assert_close([1.0, 2.5], [1.0, 2.0], 0.125, "near")
    far, near = (json.loads(line) for line in log.read_text().splitlines())
    assert far == {
        "test": "tests/test_isa.py::test_a_distance_is_logged_where_a_file_is_named",
        "what": "far",
        "found": 0.25,
        "limit": 0.5,
    }
    assert near["limit"] == 0.125
