"""Strings that end a text, looked for while it is streamed."""

from collections.abc import Iterable

from gdn_jax.errors import TextError


class StopStrings:
    """Cuts one streamed text before the first stop string, wherever its pieces begin and end.

    The stop string that is complete first counts, and the longest of those that end together, so
    the result does not depend on the pieces. Text that may be the start of a stop string is held
    back until that is decided: ``"".join(map(stop.push, pieces)) + stop.finish()`` is the text
    before the stop string.

    Raises:
        TextError: a stop string that is empty or not a string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""
        for string in self._strings:
            if not isinstance(string, str) or not string:
                raise TextError(f"stop string {string!r}; needed a string that is not empty")

    def push(self, text: str) -> str:
        """The text that may be shown after this piece; empty once a stop string was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(at + len(s), at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if places:
            _, at, self.found = min(places)
            self._held = ""
            return text[:at]
        shown = len(text) - self._undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The text that is still held back; call it at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """The length of the longest end of ``text`` that is the beginning of a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._strings)), 0)
