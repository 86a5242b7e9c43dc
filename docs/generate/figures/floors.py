"""The floors of ``gdn_jax`` and the kernels beside them."""

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from docs.generate import floors
from gdn_jax.report.svg import STYLES

GROUND = ("types", "errors", "config", "oracle", "_core")
"""Rooms that every floor above may use, drawn as one."""
LEAST = "__main__"
"""A module of one line."""
ROOF_OF_KERNELS = "models"
"""The highest floor beside which the kernels stand; those above call them only to time them."""
BESIDE = 74
"""Width of those floors, of 100."""
SIZE = 7.5
"""Of small text, in points."""


def data() -> dict[str, Any]:
    """Floors from ground to roof, as lists of rooms with what is in them."""
    kept = [
        [(name, floors.room(name)[1]) for name in names if name not in (*GROUND, LEAST)]
        for names in floors.floors()
    ]
    return {"ground": list(GROUND), "floors": [rooms for rooms in kept if rooms]}


def draw(data: dict[str, Any]) -> Figure:
    """A box a room, a line of boxes a floor."""
    levels = data["floors"]
    figure = Figure(figsize=(8.0, 0.56 * (len(levels) + 1) + 0.3), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, len(levels) + 1.45)
    names = ", ".join(data["ground"])
    _box(axes, (0, 0, 100, 1), 0, "the ground", f"{names}: every floor above may use them")
    kernels = 1 + next(i for i, rooms in enumerate(levels) if ROOF_OF_KERNELS in dict(rooms))
    for level, rooms in enumerate(levels, 1):
        each = (BESIDE if level <= kernels else 100) / len(rooms)
        for i, (name, said) in enumerate(rooms):
            _box(axes, (i * each, level, each, 1), 1, name, said)
    said = "GPU kernels and their tile sizes; imports jax alone, called by the floors at its left"
    _box(axes, (BESIDE, 1, 100 - BESIDE, kernels), 2, "pallas_kernels", said)
    axes.text(0.5, len(levels) + 1.12, "gdn_jax: an import goes down, never up or across")
    return figure


def _box(
    axes: Axes, place: tuple[float, float, float, float], style: int, name: str, said: str
) -> None:
    """A box at x, y of this width and height, with a name and a sentence in it."""
    x, y, width, height = place
    color = STYLES[style][0]
    shape = FancyBboxPatch(
        (x + 0.5, y + 0.06),
        width - 1,
        height - 0.12,
        boxstyle="round,pad=0,rounding_size=0.6",
        facecolor=color + "30",
        edgecolor=color,
        mutation_aspect=0.12,
    )
    axes.add_patch(shape)
    lines = textwrap.wrap(said.rstrip("."), int(1.25 * width))
    x, y = x + width / 2, y + height / 2 + 0.1 * (len(lines) - 1)
    axes.text(x, y + 0.03, name, ha="center", va="bottom", fontweight="bold")
    axes.text(x, y - 0.01, "\n".join(lines), ha="center", va="top", fontsize=SIZE)
