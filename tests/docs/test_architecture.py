"""docs/architecture.md: what it names is in the tree, and no kernel is missing."""

import re

from docs.generate.floors import floors, room
from docs.generate.records import ROOT, records
from tests.test_public_names import FLOORS

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CELLS = r" \|(.*)" * 4
LINE = re.compile(rf"^\| `(pallas_kernels/kernels/\w+\.py)`{CELLS} \|$", re.MULTILINE)
INDEX = LINE.findall(PAGE)


def test_every_path_is_there() -> None:
    paths = re.findall(r"`((?:gdn_jax|pallas_kernels|tests|docs)/[\w/.]*)`", PAGE)
    assert len(paths) > 50
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_kernel_has_a_line_with_a_test_and_a_recorded_row() -> None:
    kernels = {path.name for path in (ROOT / "pallas_kernels" / "kernels").glob("*.py")}
    assert {line[0].split("/")[-1] for line in INDEX} == kernels - {"__init__.py"}
    recorded = {row["id"] for record in records("bench") for row in record.data["bench"]}
    for kernel, _, _, test, rows in INDEX:
        assert "`tests/" in test, kernel
        assert set(re.findall(r"`(bench\.\S+)`", rows)) & recorded, kernel
        assert set(re.findall(r"`(bench\.\S+)`", rows)) <= recorded, kernel


def test_every_twin_is_a_function_of_its_file() -> None:
    for kernel, _, twin, _, _ in INDEX:
        source = ""
        for word in re.findall(r"`([^`]+)`", twin):
            if "/" in word:
                source = (ROOT / word).read_text(encoding="utf-8")
            else:
                assert f"def {word}(" in source, f"{kernel}: {word}"


def test_the_floors_are_those_of_the_test_of_imports() -> None:
    assert floors() == FLOORS
    assert all(said for names in FLOORS for _, said in map(room, names))
