"""Strings that end a text, found while it is streamed."""

from collections.abc import Iterable

from gdn_jax.errors import TextError


class StopStrings:
    """Cuts one streamed text before the first stop string, wherever its pieces begin and end.

    Of several the one that is complete first counts, and of those that end together the longest, so
    the result does not depend on the pieces. Text that may become a stop string is held back until
    that is decided: ``"".join(map(stop.push, pieces)) + stop.finish()`` is the text up to there.

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
        """What may be shown after this piece; nothing more once a stop string was found."""
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
        """What was still held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """The length of the longest end of ``text`` with which a stop string begins."""
        longest = max(map(len, self._strings), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(s.startswith(text[-n:]) for s in self._strings)), 0)
