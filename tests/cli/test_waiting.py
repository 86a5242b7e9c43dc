"""What a terminal shows between a question and its answer."""

import contextlib
import io
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from gdn_jax.cli import answer, loading


@pytest.mark.parametrize("terminal", [True, False])
def test_it_ends_with_the_first_token_and_is_for_terminals_alone(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    out = io.StringIO()

    def console(**_: Any) -> rich.console.Console:
        return rich.console.Console(file=out, force_terminal=terminal, width=80)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(loading, "Console", console)
    with loading.waiting("compiled") as over:
        for _ in range(500 if terminal else 20):  # it is drawn in a thread
            if "compiled" not in out.getvalue():
                time.sleep(0.01)
        assert ("compiled" in out.getvalue()) == terminal
        over()
        length = len(out.getvalue())
        out.write("the answer")
    assert out.getvalue()[length:] == "the answer"
    assert (length > 0) == terminal


@pytest.mark.parametrize("live", [True, False])
def test_text_comes_behind_it(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    """Where text is shown at the end alone, it lasts until then."""
    seen: list[Any] = []

    @contextlib.contextmanager
    def waiting(_: str) -> Iterator[Any]:
        yield lambda: seen.append("over")
        seen.append("end")

    def generate(prompts: Any, *, on_tokens: Any, **options: Any) -> Any:
        on_tokens(0, [5])
        return prompts, options

    monkeypatch.setattr(answer, "waiting", waiting)
    shown: Any = SimpleNamespace(live=live, add=lambda row, tokens: seen.append((row, tokens)))
    model: Any = SimpleNamespace(generate=generate)
    options = answer.Options("m", "q4", None, None, {"seed": 3})
    assert options.generate(model, [[1, 2]], shown) == ([[1, 2]], {"seed": 3})
    assert seen == [*(["over"] if live else []), (0, [5]), "end"]
