"""The times on the terminal."""

import math

from rich.console import Console
from rich.text import Text

from gdn_jax.verify import render as shared
from gdn_jax.verify.report import Report, Row


def render(report: Report, out: Console) -> None:
    """Print environment, settings, one table a kernel, ratios, what failed and what was not run."""
    shared.render_head(report, out)
    for check in report.checks:
        if check.id == "copy_gbps":
            out.print(
                Text.assemble(
                    "copy  ", shared.verdict(check.ok), f"  {check.value:.1f} GB/s; {check.detail}"
                )
            )
    rows = report.tables["bench"]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        out.print(_kernel(kernel, [row for row in rows if row["kernel"] == kernel]))
    _ratios(report.tables["ratios"], out)
    _not_run(report.tables["not_run"], out)
    for check in report.checks:
        if not check.ok:
            said = f"  {check.id}: {shared.number(check.value)} {check.unit}, limit "
            out.print(
                Text.assemble(shared.verdict(False), said, f"{check.limit:g}; {check.detail}")
            )
    shared.render_verdict(report, out)


def _kernel(kernel: str, rows: list[Row]):
    columns = ("shape", "B", "backend", "error", "verdict", "µs", "spread", "MB", "GB/s", "of copy")
    stacked = any(row["us_a_layer"] for row in rows)
    columns = (*columns, "µs a layer") if stacked else columns
    made = shared.table(f"{kernel}, {rows[0]['timing']}", *columns, right=len(columns) - 4)
    for row in rows:
        cells = [row["shape"], str(row["batch"]), row["backend"], shared.number(row["error"])]
        cells = [*cells, shared.verdict(row["ok"]), *_times(row)]
        made.add_row(*cells, *([f"{row['us_a_layer'] or math.nan:.2f}"] if stacked else []))
    return made


def _times(row: Row) -> list[str]:
    if row["us"] is None:
        return ["–", "–", f"{row['bytes'] / 1e6:.2f}", "–", "–"]
    spread = (row["us_high"] - row["us_low"]) / 2
    share = "–" if row["share"] is None else f"{row['share']:.1%}"
    return [
        f"{row['us']:.2f}",
        f"±{spread:.2f}",
        f"{row['bytes'] / 1e6:.2f}",
        f"{row['gbps']:.1f}",
        share,
    ]


def _ratios(rows: list[Row], out: Console) -> None:
    if not rows:
        return
    made = shared.table("How many times faster", "ours", "than", "µs", "µs", "ratio", right=3)
    for row in rows:
        numbers = (f"{row[key]:.2f}" for key in ("us", "us_to", "ratio"))
        made.add_row(row["id"], row["to"], *numbers)
    out.print(made)


def _not_run(rows: list[Row], out: Console) -> None:
    for reason in dict.fromkeys(row["reason"] for row in rows):
        batches: dict[str, list[str]] = {}
        for row in rows:
            if row["reason"] == reason:
                name, _, batch = row["id"].removeprefix("bench.").rpartition("_b")
                batches.setdefault(name, []).append(batch)
        ids = "; ".join(f"{name}, B = {', '.join(found)}" for name, found in batches.items())
        out.print(Text(f"not run, {reason}: {ids}", "yellow"), soft_wrap=True)
