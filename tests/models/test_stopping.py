"""Stop strings: where a text ends, whatever pieces it comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_jax import TextError
from gdn_jax.models.generation.stopping import StopStrings
from tests.support.tools import assert_refused


def run(strings: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str, str | None]:
    stop = StopStrings(strings)
    shown = [stop.push(piece) for piece in pieces]
    return shown, stop.finish(), stop.found


@pytest.mark.parametrize(
    ("strings", "pieces", "shown", "rest", "found"),
    [
        (("END",), ["one E", "N", "D two"], ["one ", "", ""], "", "END"),
        (("END",), ["one E", "Nd", "E"], ["one ", "ENd", ""], "E", None),
        (("aab",), ["aaa", "b", "c"], ["a", "", ""], "", "aab"),
        (("abc", "b"), ["a", "bc"], ["", "a"], "", "b"),
        (("bc", "abc"), ["xabc"], ["x"], "", "abc"),
        (("\n\n",), ["a\n", "\nb"], ["a", ""], "", "\n\n"),
        (("é",), ["caf", "é!"], ["caf", ""], "", "é"),
        ((), ["a", "b"], ["a", "b"], "", None),
    ],
)
def test_where_a_text_is_cut(
    strings: tuple[str, ...], pieces: list[str], shown: list[str], rest: str, found: str | None
) -> None:
    assert run(strings, pieces) == (shown, rest, found)


LETTERS = st.text("ab", max_size=14)


def reference(strings: list[str], text: str) -> tuple[str, str | None]:
    """Letter by letter: the first end at which any string stands, the longest of them."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(LETTERS, max_size=6))
def test_the_pieces_do_not_matter(strings: list[str], pieces: list[str]) -> None:
    shown, rest, found = run(tuple(strings), pieces)
    text = "".join(pieces)
    assert ("".join(shown) + rest, found) == reference(strings, text)
    assert found is None or not rest
    # No more is held back than may become a stop string.
    assert len(rest) < max(map(len, strings), default=1)


@pytest.mark.parametrize("strings", [("",), ("a", ""), (3,)])
def test_what_is_refused(strings: tuple) -> None:
    assert_refused(lambda: StopStrings(strings), "stop string", "not empty", error=TextError)


def test_a_single_string_is_not_taken_apart() -> None:
    stop = StopStrings("ab")
    assert stop.push("xbaab") == "xba"
    assert stop.found == "ab"
