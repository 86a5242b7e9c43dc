"""How a report writes a number, on the terminal and on the page."""

import math
from typing import Any


def number(value: Any) -> str:
    """Counts with thousands separated, small numbers in scientific form, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        if abs(value) >= 1e4 or value.is_integer():
            return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.3e}"
        if abs(value) >= 0.1:
            return f"{value:,.4g}"
        one_digit = float(f"{value:.0e}") == value
        return f"{value:.3e}" if not one_digit else f"{value:{'g' if value > 9e-4 else '.0e'}}"
    return f"{value:,}" if isinstance(value, int) else str(value)
