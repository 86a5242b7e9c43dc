"""The plots of the report: for each, the table it reads and how to read it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gdn_jax.report.record import Row
from gdn_jax.report.svg import LogScale, legend, panels, series, to_svg

_ERROR = "relative error (no unit)"
_GREY = "#7a828c"
_DECAY_FLOOR = 1e-8  # of what a token wrote: below float32's resolution of the rest


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of one table: ``draw`` makes its figure, ``name`` is unique on a page."""

    name: str
    table: str
    title: str
    caption: str
    draw: Callable[[list[Row]], Figure]

    def svg(self, rows: list[Row]) -> str:
        """The plot of these rows as an ``<svg>`` element."""
        return to_svg(self.name, lambda: self.draw(rows))


def operator_errors(rows: list[Row]) -> Figure:
    """Error by operator, a panel for each pair.

    It shows max_rel at the first token, and rms_rel at the first and the last token.
    """
    pairs, operators = _distinct(rows, "pair"), _distinct(rows, "operator")
    tokens = [row["token"] for row in rows]
    marks = [("max_rel", min(tokens)), ("rms_rel", min(tokens)), ("rms_rel", max(tokens))]
    scale = LogScale(row[key] for row in rows for key in ("max_rel", "rms_rel"))
    figure, axes = panels(len(pairs), 1, 1.0 + 1.7 * len(pairs))
    for pair, panel in zip(pairs, axes, strict=True):
        scale.apply(panel)
        panel.set_title(pair)
        for index, (key, token) in enumerate(dict.fromkeys(marks)):
            chosen = [row for row in rows if row["pair"] == pair and row["token"] == token]
            x = [operators.index(row["operator"]) + 0.2 * (index - 1) for row in chosen]
            y = [scale.place(row[key]) for row in chosen]
            label = f"{key}, token {token}"
            series(panel, x, y, index, label, linestyle="none", markevery=1)
    axes[-1].set_xticks(range(len(operators)), operators)
    axes[-1].set_xlabel("operator, in the order of the seven steps")
    figure.supylabel(_ERROR, fontsize=9)
    legend(figure, axes[0])
    return figure


def token_errors(rows: list[Row]) -> Figure:
    """Error of the layer's output by token, with the limits: a line for each pair."""
    keys = ("max_rel", "rms_rel")
    limits = dict.fromkeys(row["limit"] for row in rows if row["limit"] is not None)
    scale = LogScale([row[key] for row in rows for key in keys] + list(limits))
    figure, axes = panels(1, 2, 3.4)
    for key, panel in zip(keys, axes, strict=True):
        scale.apply(panel)
        panel.set_title(key)
        for index, pair in enumerate(_distinct(rows, "pair")):
            chosen = [row for row in rows if row["pair"] == pair]
            y = [scale.place(row[key]) for row in chosen]
            series(panel, [row["token"] for row in chosen], y, index, pair)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("token")
    for limit in limits:
        y = scale.place(limit)
        axes[0].axhline(y, color=_GREY, linewidth=1)
        at = axes[0].get_yaxis_transform()
        text = f"limit {float(limit):.1e}"
        axes[0].text(1, y * 1.1, text, transform=at, horizontalalignment="right", fontsize=8)
    axes[0].set_ylabel(_ERROR)
    legend(figure, axes[0])
    return figure


def drift(rows: list[Row]) -> Figure:
    """Error of the output and of the state over a long run."""
    labels = {"max_rel": "output, max_rel", "rms_rel": "output, rms_rel", "S_rms_rel": "S, rms_rel"}
    scale = LogScale(row[key] for row in rows for key in labels)
    figure, (panel,) = panels(1, 1, 3.2)
    scale.apply(panel)
    for index, (key, label) in enumerate(labels.items()):
        y = [scale.place(row[key]) for row in rows]
        series(panel, [row["token"] for row in rows], y, index, label, linewidth=1)
    panel.set_xlabel("token")
    panel.set_ylabel(_ERROR)
    legend(figure, panel)
    return figure


def group_errors(rows: list[Row]) -> Figure:
    """Error of the stored weights by group size, a line for each rule."""
    sizes = {row["group"]: f"{row['group']}\n{float(row['bits']):g} bits" for row in rows}
    places = list(sizes)
    scale = LogScale(row["rms_rel"] for row in rows)
    figure, (panel,) = panels(1, 1, 3.0)
    for index, rule in enumerate(_distinct(rows, "rule")):
        chosen = [row for row in rows if row["rule"] == rule]
        y = [scale.place(row["rms_rel"]) for row in chosen]
        series(panel, [places.index(row["group"]) for row in chosen], y, index, f"rule {rule}")
    if scale.below or scale.above:
        scale.apply(panel)
    else:
        panel.set_ylim(0, 1.15 * max(row["rms_rel"] for row in rows))
    panel.set_xticks(range(len(places)), list(sizes.values()))
    panel.set_xlabel("weights in a group, and bits a weight")
    panel.set_ylabel(_ERROR)
    legend(figure, panel)
    return figure


def kept_by_head(rows: list[Row]) -> Figure:
    """The product of decays since the first token: every head, the median, both extremes."""
    label = "share kept of the first write (no unit)"
    return _by_head(rows, "kept", label, _DECAY_FLOOR)


def norm_by_head(rows: list[Row]) -> Figure:
    """The Frobenius norm of S: every head, the median, both extremes at the last token."""
    return _by_head(rows, "S_norm", "Frobenius norm of S (no unit)", 0.0)


PLOTS = (
    Plot(
        "operator-errors",
        "operators",
        "Error by operator",
        "Read from left to right: a column that lies far above the one before it is where error "
        "arises; a circle is the largest error of the first token over the largest value, square "
        "and triangle the root mean square error of the first and the last token.",
        operator_errors,
    ),
    Plot(
        "token-errors",
        "tokens",
        "Error by token",
        "Each line is one pair; level lines mean that error does not build up in the state, and "
        "every point on the left has to stay below the limit of its pair.",
        token_errors,
    ),
    Plot(
        "drift",
        "drift",
        "Drift over a long run",
        "Distance to float64 as one sequence grows: a state that forgets its errors gives a level "
        "band, one that collects them a rising one.",
        drift,
    ),
    Plot(
        "kept",
        "decay",
        "What a head keeps",
        "Each thin line is one head: the product of its decays, which is what remains of the "
        f"first token's write before later tokens overwrite it; below {_DECAY_FLOOR:g} it is "
        "drawn at the bottom.",
        kept_by_head,
    ),
    Plot(
        "S-norm",
        "decay",
        "Size of the state",
        "Each thin line is the Frobenius norm of one head's S: it grows from zero and levels off "
        "where decay and writes balance, sooner in heads that forget faster.",
        norm_by_head,
    ),
    Plot(
        "q4-operator-errors",
        "q4_operators",
        "int4: error by operator",
        "To float32 with the original weights: the cost of four bits. It enters with the three "
        "projections, at XC, Z and OUT, and the panel shows how it moves in between; B, A, BETA "
        "and G come from float32 weights. To the same weights dequantised only rounding is left, "
        "and a column far above the one before it is a mistake in the int4 path.",
        operator_errors,
    ),
    Plot(
        "q4-drift",
        "q4_drift",
        "int4: the cost over a long run",
        "Distance of int4 to float32 with the original weights as one sequence grows: level lines "
        "mean that the state forgets the error about as fast as new tokens bring it.",
        drift,
    ),
    Plot(
        "q4-groups",
        "q4_groups",
        "int4: group size and rule",
        "Distance of the stored weights of in_proj_qkv to the original ones: smaller groups cost "
        "more bits, and least squares (mse) gains at no cost in bits. Files and kernels have "
        "groups of 32.",
        group_errors,
    ),
)


def render_plots(data: Mapping[str, Any], plots: Sequence[Plot] = PLOTS) -> list[tuple[Plot, str]]:
    """Each plot whose table has rows, with its SVG."""
    return [(plot, plot.svg(data[plot.table])) for plot in plots if data.get(plot.table)]


def _by_head(rows: list[Row], key: str, label: str, floor: float) -> Figure:
    scale = LogScale((row[key] for row in rows), floor)
    by_head: dict[int, dict[int, float]] = {}
    by_token: dict[int, list[float]] = {}
    for row in rows:
        y = scale.place(row[key])
        by_head.setdefault(row["head"], {})[row["token"]] = y
        by_token.setdefault(row["token"], []).append(y)
    figure, (panel,) = panels(1, 1, 3.2)
    scale.apply(panel)
    for line in by_head.values():
        panel.plot(list(line), list(line.values()), color=_GREY, alpha=0.5, linewidth=0.7)
    median = [float(np.median(values)) for values in by_token.values()]
    series(panel, list(by_token), median, 0, f"median of {len(by_head)} heads", linewidth=2)
    last = {row["head"]: float(row[key]) for row in rows}
    for index, (word, pick) in enumerate((("highest", max), ("lowest", min)), start=1):
        head = pick(last, key=last.__getitem__)
        line = by_head[head]
        series(panel, list(line), list(line.values()), index, f"{word} at the end: head {head}")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("token")
    panel.set_ylabel(label)
    legend(figure, panel)
    return figure


def _distinct(rows: list[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))
