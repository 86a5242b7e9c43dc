"""The code of README and of every guide runs, each page from its first block to its last."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gdn_jax").symlink_to(ROOT / "gdn_jax")
    code = blocks(page)
    assert code
    exec(compile("\n".join(code), str(page), "exec"), {})


def test_readme_says_how_to_use_a_layer_and_a_model_in_few_lines() -> None:
    layer, text = blocks(PAGES[0])
    assert len(layer.splitlines()) <= 12
    assert len(text.splitlines()) <= 6
