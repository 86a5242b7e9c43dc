"""The roofline plot: what each row reaches, below what the copy's bandwidth allows."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from gdn_jax.bench.rows import MODEL_DECODE, MODEL_PREFILL
from gdn_jax.report.plots import Plot
from gdn_jax.report.record import Row
from gdn_jax.report.svg import series

_GREY = "#7a828c"
_FAMILIES = {
    "int4": ("int4",),
    "float32": ("float32",),
    "bfloat16": ("bfloat16",),
    "delta rule and middle kernel": ("delta", "middle"),
    "chunked delta rule": ("chunk", "chunk_f32", "chunk_packed"),
    "prefill of one layer": tuple(
        f"prefill{part}" for part in ("", "_projections", "_convolution", "_rule")
    ),
    "one layer": ("layer_f32", "layer_bf16", "layer_q4"),
    "stack, int4": ("stack_q4", "stack_q4_sync"),
    "stack, bfloat16": ("stack_bf16", "stack_bf16_sync"),
    "steps of a whole model": (MODEL_DECODE,),
    "prompts of a whole model": (MODEL_PREFILL,),
}
"""Kernels of each panel; host round trips have no place under a roof."""
_SIDES = ((5, "left"), (-5, "right"))


def roofline(rows: list[Row]) -> Figure:
    """GFLOP/s over FLOP per byte, below the line of the copy's bandwidth.

    Each family of kernels has a panel and each row a mark, with its batch beside it. Rows of many
    tokens have their number of tokens there instead, and the line of the matrix product above them.
    """
    timed = [row for row in rows if row["us"] and row["flops"]]
    groups = {
        family: [row for row in timed if row["kernel"] in kernels]
        for family, kernels in _FAMILIES.items()
    }
    groups = {family: members for family, members in groups.items() if members}
    lines = max(1, -(-len(groups) // 2))
    figure = Figure(figsize=(8.0, 0.3 + 3.1 * lines), layout="constrained")
    panels = list(figure.subplots(lines, 2, squeeze=False).flat)
    for (family, members), panel in zip(groups.items(), panels, strict=False):
        _panel(panel, family, members)
    for panel in panels[len(groups) :]:
        panel.set_visible(False)
    figure.supxlabel("floating point operations a byte (FLOP/B)", fontsize=9)
    figure.supylabel("speed (GFLOP/s)", fontsize=9)
    return figure


def _panel(panel: Axes, family: str, rows: list[Row]) -> None:
    panel.set_title(family)
    _axes(panel, rows)
    lines: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["kernel"], _series(row)[0], row["backend"]), []).append(row)
    placed: tuple[list[tuple[float, float]], ...] = ([], [])
    several = len({kernel for kernel, _, _ in lines}) > 1
    for index, ((kernel, shape, backend), line) in enumerate(lines.items()):
        line.sort(key=lambda row: int(_series(row)[1]))
        x, y = ([row[key] for row in line] for key in ("flops_a_byte", "gflops"))
        label = f"{backend}, {kernel}, {shape}" if several else f"{backend}, {shape}"
        series(panel, x, y, index, label, markevery=1, linewidth=0.8)
        _numbers(panel, line, *_SIDES[index % 2], placed[index % 2])
    panel.legend(fontsize=7, loc="lower right")


def _axes(panel: Axes, rows: list[Row]) -> None:
    """Draw logarithmic axes, at least a third of a decade around the marks, and the ceilings."""
    x, y = ([row[key] for row in rows] for key in ("flops_a_byte", "gflops"))
    roof = next((row["gbps"] / row["share"] for row in rows if row["share"]), None)
    low, high = min(x) / 2.5, max(x) * 4
    top = next((r["gflops"] / r["share_matrix"] for r in rows if r.get("share_matrix")), None)
    tops = [*y, *([] if roof is None else [max(x) * roof])]
    tops = tops if top is None else [*y, top]
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(low, high)
    panel.set_ylim(min(y) / (12 if top is None else 200), max(tops) * 2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(_tick))
        axis.set_minor_formatter(NullFormatter())
    if roof is not None:
        label = f"copy, {roof:,.0f} GB/s"
        panel.plot((low, high), (low * roof, high * roof), color=_GREY, lw=1.5, label=label)
    if top is not None:
        label = f"matrix product, {top / 1e3:,.0f} TFLOP/s"
        panel.plot((low, high), (top, top), color=_GREY, lw=1.5, ls="--", label=label)


def _tick(value: float, _: Any) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _series(row: Row) -> tuple[str, str]:
    """What the marks of a line have in common, and this mark's number: its batch or its tokens."""
    if not row.get("matrix"):
        return row["shape"], str(row["batch"])
    shape, _, tokens = row["shape"].partition("_t")
    return shape, tokens.partition("_")[0]


def _numbers(
    panel: Axes, line: list[Row], offset: int, side: str, placed: list[tuple[float, float]]
) -> None:
    """Write numbers at the marks, but not where another number on that side is too near."""
    bounds = [[math.log(end) for end in ends] for ends in (panel.get_xlim(), panel.get_ylim())]
    for row in line:
        logs = (math.log(row["flops_a_byte"]), math.log(row["gflops"]))
        x, y = ((v - low) / (high - low) for v, (low, high) in zip(logs, bounds, strict=True))
        if any(abs(x - a) < 0.05 and abs(y - b) < 0.045 for a, b in placed):
            continue
        placed.append((x, y))
        panel.annotate(
            _series(row)[1],
            (row["flops_a_byte"], row["gflops"]),
            (offset, -3),
            textcoords="offset points",
            fontsize=7,
            horizontalalignment=side,
        )


PLOTS = (
    Plot(
        "roofline",
        "bench",
        "Roofline",
        "Each mark is one row, and the number at it the batch, or the tokens where many are taken "
        "at once, where there is room. The grey line is what the copy's bandwidth of this run "
        "allows: a mark on it moves its bytes as fast as a copy, and the distance below it, "
        "straight down, is what is lost. The broken line is a large matrix product of this run.",
        roofline,
    ),
)
