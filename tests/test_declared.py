"""Everything that is imported is declared in pyproject.toml, and everything declared is used."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = {"gdn_jax", "pallas_kernels", "tests", "docs"}
PEERS = {"fla"}
"""Other people's kernels, which bench times where they are installed and leaves out elsewhere."""

WITH_JAX = {"jaxlib"}
"""jax pins the version of it; whoever declares jax has declared it."""

NOT_IMPORTED = {
    "ipykernel": "the kernel that runs a notebook",
    "pytest-xdist": "a plugin of pytest",
    "ruff": "a command",
    "pyright": "a command",
}

EXTRAS = {
    "gdn_jax": ["report", "oracle"],
    "pallas_kernels": [],
    "docs": ["report", "docs"],
    "tests": ["dev", "oracle"],
}
"""Which extras may stand behind the imports of a folder, besides the dependencies."""


def names(requirements: list[str]) -> set[str]:
    """Normalised names of distributions; an extra of this project stands for what it lists."""
    found: set[str] = set()
    for requirement in requirements:
        match = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement)
        assert match is not None, requirement
        if match[1] == PROJECT["name"]:
            found |= declared(match[2].split(","))
        else:
            found.add(re.sub(r"[-_.]+", "-", match[1]).lower())
    return found


def declared(extras: list[str]) -> set[str]:
    optional = PROJECT["optional-dependencies"]
    return set().union(*(names(optional[extra]) for extra in extras if extra in optional))


def imported(folder: Path) -> dict[str, Path]:
    """Top-level modules of others that files of the folder import, and one file that does."""
    found: dict[str, Path] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules: list[Any] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            found |= {module.split(".")[0]: path for module in modules}
    return {m: path for m, path in found.items() if m not in OURS | PEERS | sys.stdlib_module_names}


DISTRIBUTIONS = {
    module: {re.sub(r"[-_.]+", "-", name).lower() for name in those}
    for module, those in packages_distributions().items()
}


@pytest.mark.parametrize("folder", EXTRAS)
def test_what_is_imported_is_declared(folder: str) -> None:
    known = names(PROJECT["dependencies"]) | declared(EXTRAS[folder]) | WITH_JAX
    for module, path in imported(ROOT / folder).items():
        distributions = DISTRIBUTIONS.get(module, {module.replace("_", "-")})
        assert distributions & known, f"{path.relative_to(ROOT)} imports {module}"


def test_what_is_declared_is_imported() -> None:
    extras = [*PROJECT["optional-dependencies"]]
    used: set[str] = set()
    for folder in OURS:
        for module in imported(ROOT / folder):
            used |= DISTRIBUTIONS.get(module, {module.replace("_", "-")})
    unused = names(PROJECT["dependencies"]) | declared([e for e in extras if e != "docs"])
    assert unused - used <= NOT_IMPORTED.keys()
