"""docs/architecture.md: the floors as the test of imports holds them, rooms in their own words."""

import ast
from pathlib import Path

from docs.generate.markdown import table
from docs.generate.records import ROOT

START, END = "<!-- floors -->\n", "<!-- /floors -->"
TEST = ROOT / "tests" / "test_public_names.py"


def floors() -> tuple[tuple[str, ...], ...]:
    """Ground to roof, from the test that holds the order."""
    for node in ast.parse(TEST.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            return ast.literal_eval(node.value)
    raise AssertionError(f"no FLOORS in {TEST}")


def room(name: str) -> tuple[str, str]:
    """Path and first sentence of the docstring of a folder or module of ``gdn_jax``."""
    folder = ROOT / "gdn_jax" / name
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return _shown(folder if folder.is_dir() else file), said.splitlines()[0]


def floors_renewed(page: str) -> str:
    """The page with the table between its markers replaced, roof first."""
    rows = [
        [str(level), f"`{path}`", said]
        for level, names in reversed(list(enumerate(floors(), 1)))
        for path, said in map(room, names)
    ]
    head, rest = page.split(START)
    body = "\n".join(table(["floor", "room", "what is in it"], rows))
    return head + START + body + END + rest.split(END)[1]


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() + ("/" if path.is_dir() else "")
