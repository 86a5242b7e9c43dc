"""README: its code runs, its table is the one that the recorded results give."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gdn_jax").symlink_to(ROOT / "gdn_jax")
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    exec("\n".join(blocks), names)
    assert (tmp_path / "state.safetensors").is_file()
    assert names["y"].shape == (1, 64)  # pyright: ignore[reportAttributeAccessIssue]
    assert len(names["found"].tokens) == 16  # pyright: ignore[reportAttributeAccessIssue]


def test_the_measured_table_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("measured", ROOT / "docs" / "measured.py")
    assert spec is not None
    assert spec.loader is not None
    measured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    assert "f32.float64" in measured.table()
    assert measured.renewed(README) == README, "run `python docs/measured.py`"
    page = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8")
    assert measured.ladder_page() == page, "run `python docs/measured.py`"
