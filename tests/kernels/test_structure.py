"""Who touches private JAX, how long functions are, and which measurement chose a tile size."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels import tuning

ROOT = Path(pallas_kernels.__file__).parents[1]
KERNELS = sorted((ROOT / "pallas_kernels").rglob("*.py"))
SOURCES = [path for folder in ("gdn_jax", "tests") for path in (ROOT / folder).rglob("*.py")]
PRIVATE = ("jax._src", "jaxlib", "jax.experimental.mosaic")
"""Not ``jax.experimental.pallas``, whose ``mosaic_gpu`` is public."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def private_imports(path: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return [m for m in modules if any(f"{m}.".startswith(f"{p}.") for p in PRIVATE)]


def test_private_parts_of_jax_are_touched_in_two_places() -> None:
    users = {name_of(path) for path in (*KERNELS, *SOURCES) if private_imports(path)}
    helper = "tests/support/mosaic.py"
    assert helper in users
    assert not [u for u in users - {helper} if not u.startswith("pallas_kernels/mosaic/")]


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_no_function_is_longer_than_fifty_lines_of_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            assert (node.end_lineno or 0) - first.lineno < 50, node.name


def versions_of(function: object) -> tuple[str | None, list[str]]:
    """The device that a docstring names, and the recorded versions that chose its numbers."""
    text = inspect.getdoc(function) or ""
    named = re.search(r"^Chosen on (.+) by\n((?: .*\n?)+)", text, re.MULTILINE)
    if not named:
        return None, []
    rows = re.split(r"^\s+- ", named[2], flags=re.MULTILINE)[1:]
    return named[1], [" ".join(row.split()) for row in rows]


CHOOSERS = {
    name: f
    for name, f in vars(tuning).items()
    if inspect.isfunction(f) and f.__module__ == tuning.__name__ and not name.startswith("_")
}


@pytest.mark.parametrize("name", CHOOSERS)
def test_a_tile_size_names_the_recorded_versions_that_chose_it(name: str) -> None:
    device, versions = versions_of(CHOOSERS[name])
    assert versions or "Not measured: " in (CHOOSERS[name].__doc__ or "")
    ladder = json.loads((ROOT / "docs/results/ladder.json").read_text(encoding="utf-8"))
    recorded = {f"{row['kernel']}: {row['version']}" for row in ladder if row["device"] == device}
    assert set(versions) <= recorded
