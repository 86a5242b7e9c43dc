"""Tokens a second of a whole model, over the batch and over the tokens before the step."""

import re
from typing import Any

from matplotlib.figure import Figure

from docs.generate.records import records
from docs.generate.times import newest
from gdn_jax.report.svg import series


def data() -> dict[str, Any]:
    """Of every step of a whole model: batch, tokens before it, tokens a second and its floor's."""
    found = [record for record in records("bench") if record.device == "NVIDIA H200"]
    steps = []
    for row in newest(found):
        if row["kernel"] == "model_decode":
            (context,) = re.findall(r"_p(\d+)", row["shape"])
            rate = row["tokens_a_second"]
            floor = round(rate / row["share"], 1)
            steps.append([row["batch"], int(context), round(rate, 1), floor])
    dates = {r.date for r in found if any(x["kernel"] == "model_decode" for x in r.data["bench"])}
    return {"steps": sorted(steps), "where": f"NVIDIA H200, {' to '.join(sorted(dates))}"}


def draw(data: dict[str, Any]) -> Figure:
    """Two panels: over the batch at the shortest context, over contexts at one row."""
    figure = Figure(figsize=(8.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = data["steps"]
    shortest = min(context for _, context, _, _ in steps)
    over_batch = [(batch, *rates) for batch, context, *rates in steps if context == shortest]
    over_context = [(context, *rates) for batch, context, *rates in steps if batch == 1]
    for axes, lines in ((left, over_batch), (right, over_context)):
        x = [line[0] for line in lines]
        series(axes, x, [line[1] for line in lines], 0, "measured")
        series(axes, x, [line[2] for line in lines], 5, "floor: each byte once at the copy's rate")
        for at, rate, _ in lines:
            axes.annotate(
                f"{rate:.0f}",
                (at, rate),
                xytext=(0, -13),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes.set_xscale("log", base=2 if axes is left else 10)
        axes.set_xticks(x, [f"{n:,}".replace(",", " ") for n in x])
        axes.minorticks_off()
        axes.margins(x=0.12)
        axes.set_ylabel("tokens/s, all rows together")
    ticks = (100, 200, 500, 1000, 2000, 5000)
    left.set_yscale("log")
    left.set_yticks(ticks, map(str, ticks))
    left.minorticks_off()
    left.set_ylim(100, 9000)
    right.set_ylim(0, 1.12 * max(rates[1] for _, *rates in over_context))
    left.set_xlabel(f"rows B, after {shortest} tokens")
    right.set_xlabel("tokens before the step, B = 1")
    left.legend(loc="upper left", fontsize=8)
    figure.suptitle(f"Decoding, 27B in int4, drawn weights; {data['where']}", fontsize=10)
    return figure
