"""How errors grow over 512 tokens of a carried state."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.generate.records import Row, records
from gdn_jax.report.svg import LogScale, legend, series

BLOCK = 16
"""Tokens a point: the worst of them is drawn."""


def data() -> dict[str, Any]:
    """By device and backend: max_rel of float32 to float64, rms_rel of int4 to float32."""
    rounding: dict[str, list[float]] = {}
    quantised: dict[str, list[float]] = {}
    dates, limits = {}, set()
    for record in records("verify"):
        if "drift" in record.data:
            rounding[record.column] = _worst(record.data["drift"], "max_rel")
            quantised[record.column] = _worst(record.data["q4_drift"], "rms_rel")
            dates[record.device] = record.date
            checks = record.data["checks"]
            limits |= {check["limit"] for check in checks if check["id"] == "f32.drift512"}
    (limit,) = limits
    where = ", ".join(f"{device} {date}" for device, date in sorted(dates.items()))
    return {"rounding": rounding, "quantised": quantised, "limit": limit, "where": where}


def draw(data: dict[str, Any]) -> Figure:
    """Two panels: rounding, and what quantising drawn weights costs."""
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, data["rounding"], "Rounding: float32 to float64", data["limit"])
    left.axhline(data["limit"], color="#d1242f", linewidth=1)
    said = f"limit of f32.drift512, {data['limit']:g}"
    left.annotate(said, (4, data["limit"]), xytext=(0, -12), textcoords="offset points", fontsize=8)
    left.set_ylabel(f"max_rel, worst of {BLOCK} tokens")
    _panel(right, data["quantised"], "Quantising: int4 to float32", 1.0)
    right.set_ylabel(f"rms_rel, worst of {BLOCK} tokens")
    legend(figure, left)
    figure.supxlabel(f"Output of a 27B layer, drawn weights; {data['where']}", fontsize=8)
    return figure


def _panel(axes: Axes, lines: dict[str, list[float]], title: str, top: float) -> None:
    for i, (label, values) in enumerate(sorted(lines.items())):
        ends = range(BLOCK, BLOCK * len(values) + 1, BLOCK)
        series(axes, ends, values, i, label)
    LogScale([top, *(value for values in lines.values() for value in values)]).apply(axes)
    axes.set_xlim(0, None)
    axes.set_xlabel("token")
    axes.set_title(title)


def _worst(rows: list[Row], name: str) -> list[float]:
    values = [row[name] for row in rows]
    blocks = (values[i : i + BLOCK] for i in range(0, len(values), BLOCK))
    return [float(f"{max(block):.4g}") for block in blocks]
