"""The share of the copy's bandwidth that each kernel and layer reaches."""

from typing import Any

from matplotlib.figure import Figure

from docs.generate.records import records
from docs.generate.times import BATCHES, newest
from gdn_jax.report.svg import STYLES

SHOWN = {
    ("stream", "16384x5120"): "reading alone, 16384×5120",
    ("int4", "16384x5120"): "int4 product, 16384×5120",
    ("int4", "5120x6144"): "int4 product, 5120×6144",
    ("delta", "48x128x128"): "delta rule, 48 heads",
    ("middle", "48x128x128"): "middle kernel, 48 heads",
    ("layer_f32", "d5120"): "layer, float32",
    ("layer_bf16", "d5120"): "layer, bfloat16",
    ("layer_q4", "d5120"): "layer, int4",
}
"""Kernel and shape, and the words for them, from top to bottom."""


def data() -> dict[str, Any]:
    """Shares by label and batch, of the newest rows."""
    found = [record for record in records("bench") if record.device == "NVIDIA H200"]
    shares: dict[str, dict[str, float]] = {label: {} for label in SHOWN.values()}
    for row in newest(found):
        label = SHOWN.get((row["kernel"], row["shape"]))
        if label and row["batch"] in BATCHES:
            shares[label][str(row["batch"])] = row["share"]
    dates = sorted({record.date for record in found})
    return {"shares": shares, "where": f"NVIDIA H200, {' to '.join(dates)}"}


def draw(data: dict[str, Any]) -> Figure:
    """A group of bars a kernel, a bar a batch."""
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    labels = list(data["shares"])
    for i, batch in enumerate(map(str, BATCHES)):
        rows = [
            (n, shares[batch])
            for n, shares in enumerate(data["shares"].values())
            if batch in shares
        ]
        places = [n + 0.27 * (i - 1) for n, _ in rows]
        widths = [100 * share for _, share in rows]
        bars = axes.barh(places, widths, 0.25, color=STYLES[i][0], label=f"B = {batch}")
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 110)
    axes.set_xlabel("bandwidth reached, % of the copy x + 1 of the same run")
    axes.set_title(f"Share of bandwidth by kernel; 27B shapes, {data['where']}")
    axes.legend(loc="lower right", fontsize=8)
    return figure
