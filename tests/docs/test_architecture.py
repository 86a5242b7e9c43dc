"""docs/architecture.md: what it names is in the tree, and no kernel is missing."""

import re

from docs.generate.floors import floors, room
from docs.generate.records import ROOT
from gdn_jax.bench.run import BACKENDS, SUITES, subjects
from gdn_jax.config import PRESETS
from tests.test_public_names import FLOORS

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LINE = re.compile(r"^\| `(pallas_kernels/kernels/\w+\.py)` \|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)
INDEX = LINE.findall(PAGE)


def test_every_path_is_there() -> None:
    paths = re.findall(r"`((?:gdn_jax|pallas_kernels|tests|docs)/[\w/.]*)`", PAGE)
    assert len(paths) > 50
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_kernel_has_a_line_with_a_twin_a_test_and_rows() -> None:
    kernels = {path.name for path in (ROOT / "pallas_kernels" / "kernels").glob("*.py")}
    assert {line[0].split("/")[-1] for line in INDEX} == kernels - {"__init__.py"}
    timed = subjects(PRESETS["qwen3.5-27b"], [*SUITES, "prefill", "model"], (1,), BACKENDS)
    names = {subject.kernel for subject in timed}
    for kernel, twin, test, rows in INDEX:
        assert "tests/" in test, kernel
        assert twin.strip(), kernel
        assert set(re.findall(r"`(\w+)`", rows)) & names, kernel
        assert set(re.findall(r"`(\w+)`", rows)) <= names, kernel


def test_the_floors_are_those_of_the_test_of_imports() -> None:
    assert floors() == FLOORS
    assert all(said for names in FLOORS for _, said in map(room, names))
