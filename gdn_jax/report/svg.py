"""Plots as SVG text for a page that may be light or dark; needs the ``report`` extra."""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

STYLES = (
    ("#3b7dd8", "o", "-"),
    ("#d55e00", "s", "--"),
    ("#1a9070", "^", "-."),
    ("#b35fb5", "D", ":"),
    ("#967117", "v", (0, (6, 2))),
    ("#7a828c", "P", (0, (1, 1))),
)
"""Colour, marker and dash of each series: 3:1 contrast on white and on near-black."""

_INK = "#010203"  # every neutral part is drawn in it, and it becomes currentColor
_RC = {
    "axes.edgecolor": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "none",
    "font.size": 9,
    "grid.alpha": 0.2,
    "grid.color": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "gdn-jax",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_REFERENCES = re.compile(r'(\bid="|href="#|url\(#)')


def to_svg(name: str, draw: Callable[[], Figure]) -> str:
    """One ``<svg>`` element, the same for the same figure; its ids all begin with ``name``.

    Text stays text; text, axes and grid are in ``currentColor``; the background is clear.
    """
    buffer = io.StringIO()
    with style.context(["default", _RC]):
        draw().savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return _REFERENCES.sub(rf"\g<1>{name}-", text)


def panels(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of ``height`` inches and its panels, which share both axes."""
    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    return figure, list(axes.flat)


def series(
    axes: Axes, x: Sequence[float], y: Sequence[float], index: int, label: str, **overrides: Any
) -> None:
    """Draw a line in the style number ``index``, with at most about 16 markers."""
    color, marker, dash = STYLES[index % len(STYLES)]
    every = max(1, len(x) // 16)
    look: dict[str, Any] = dict(color=color, marker=marker, linestyle=dash, markevery=every)
    axes.plot(x, y, label=label, **(look | overrides))


def legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """The legend of one panel, above all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=9)


class LogScale:
    """A logarithmic scale on which zero and infinity have places of their own.

    Made from all ``values`` to be drawn: numbers, the strings "inf" and "nan", or None. What is
    at most ``floor`` is drawn below the lowest decade, what is not finite above the highest.
    """

    def __init__(self, values: Iterable[Any], floor: float = 0.0) -> None:
        numbers = [float(value) for value in values if value is not None]
        inside = [x for x in numbers if math.isfinite(x) and x > floor]
        self.floor = floor
        self.low = math.floor(math.log10(min(inside, default=1.0)))
        self.high = max(math.ceil(math.log10(max(inside, default=1.0))), self.low + 1)
        self.below = any(x <= floor for x in numbers)
        self.above = not all(map(math.isfinite, numbers))

    def place(self, value: Any) -> float:
        """Where a value is drawn; None is drawn nowhere."""
        if value is None:
            return math.nan
        number = float(value)
        if math.isfinite(number) and number > self.floor:
            return number
        return 10.0 ** (self.low - 0.7 if number <= self.floor else self.high + 0.7)

    def apply(self, axes: Axes) -> None:
        """Give the y axis this scale, one tick a decade, and ticks for zero and infinity."""
        span = self.high - self.low
        decades = range(self.low, self.high + 1, span // 7 + 1)
        ticks = {10.0**n: f"10{str(n).translate(_SUPERSCRIPT)}" for n in decades}
        if self.below:
            ticks[self.place(self.floor)] = f"≤ {self.floor:g}" if self.floor else "0"
        if self.above:
            ticks[self.place(math.inf)] = "inf, nan"
        axes.set_yscale("log")
        axes.set_ylim(
            10.0 ** (self.low - (1 if self.below else 0.1)),
            10.0 ** (self.high + (1 if self.above else 0.1)),
        )
        axes.set_yticks(list(ticks), list(ticks.values()))
        minor = LogLocator(subs=range(2, 10)) if span <= 2 else NullLocator()
        axes.yaxis.set_minor_locator(minor)
        axes.yaxis.set_minor_formatter(NullFormatter())
