"""What a terminal shows between a question and its answer."""

import io
import time
from typing import Any

import pytest
import rich.console

from gdn_jax.commands import loading


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
