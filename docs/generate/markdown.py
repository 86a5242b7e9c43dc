"""Tables and numbers as Markdown."""

from collections.abc import Sequence
from typing import Any

NONE = "–"
MOST_COLUMNS = 8
"""Of a table; wider ones are split."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table and an empty one after it; none without rows."""
    if not rows:
        return []
    assert len(head) <= MOST_COLUMNS, f"{len(head)} columns: split the table"
    lines = [head, ["---"] * len(head), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return [*("| " + " | ".join(line) + " |" for line in cells), ""]


def number(value: Any) -> str:
    """A count as it is, a float with three digits."""
    if value is None:
        return NONE
    return f"{value:.2e}" if isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    """A share in per cent."""
    return NONE if share is None else f"{share:.0%}"


def span(values: Sequence[float]) -> str:
    """The least and the greatest, or one number where they agree."""
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"
