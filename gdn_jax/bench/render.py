"""A report of times on the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdn_jax.bench.rows import COPIES, MATRIX, MODEL, OTHERS, host_bound
from gdn_jax.report import render as shared
from gdn_jax.report.numbers import number
from gdn_jax.report.record import Report, Row


def render(report: Report, out: Console) -> None:
    """Print environment, settings, a table for each kernel, what failed and what was not run.

    ``host`` behind a time says that the device waited for the host.
    """
    shared.render_head(report, out)
    for check in report.checks:
        if check.id in COPIES:
            said = f"  {check.value:.1f} GB/s; {check.detail}"
            out.print(Text.assemble("copy  ", shared.verdict(check.ok), said))
        elif check.id == MATRIX:
            said = f"  {check.value:.1f} {check.unit}; {check.detail}"
            out.print(Text.assemble("matrix product  ", shared.verdict(check.ok), said))
    rows = report.tables["bench"]
    many = [row for row in rows if row["matrix"]]
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        ids = {row["id"] for row in mine if not row["matrix"]}
        ratios = [r for r in report.tables["ratios"] if r["id"] in ids]
        out.print(_kernel(kernel, mine, ratios))
    if many:
        out.print(_many(many, report.tables["ratios"]))
    for part in report.tables.get("prefill_parts", ()):
        names = [name for name in part if name not in ("shape", "backend", "us")]
        said = ", ".join(f"{name} {_share(part[name])}" for name in names)
        out.print(f"prefill, {part['backend']}, {part['shape']}: {said}")
    named = {*COPIES, MATRIX, *(row["id"] for row in rows)}
    for check in report.checks:
        if check.ok and check.id not in named:
            said = f"  {check.id}: {check.value:.3f} {check.unit}, limit {check.limit:g}; "
            out.print(Text.assemble(shared.verdict(True), said + check.detail))
    _not_run(report.tables["not_run"], out)
    for check in report.checks:
        if not check.ok:
            said = f"  {check.id}: {number(check.value)} {check.unit}, limit "
            out.print(
                Text.assemble(shared.verdict(False), said, f"{check.limit:g}; {check.detail}")
            )
    shared.render_verdict(report, out)


def _kernel(kernel: str, rows: list[Row], ratios: list[Row]) -> Table:
    others = [name for name in OTHERS if any(r["backend"] == name for r in ratios)]
    stacked = any(row["us_a_layer"] for row in rows)
    columns = ["shape", "B", "backend", "error", "", "µs", "spread", "MB", "GB/s", "of copy"]
    streaming = any(r["backend"] == "stream" for r in ratios)
    columns += ["of streaming only"] * streaming
    columns += [f"× {name}" for name in others] + ["µs a layer"] * stacked
    counted = any(row["tokens_a_second"] for row in rows)
    columns += ["tokens/s" if kernel in MODEL else "tokens/s a layer"] * counted
    made = shared.table(f"{kernel}, {rows[0]['timing']}", *columns, right=len(columns) - 3)
    made.columns[0].overflow = "fold"
    faster = {(r["id"], r["backend"]): r["ratio"] for r in ratios}
    for row in rows:
        error = "0" if row["error"] == 0 else f"{row['error']:.1e}"
        cells = [row["shape"], str(row["batch"]), row["backend"], error]
        compared = [_short(faster.get((row["id"], name))) for name in others]
        read = [_share(faster.get((row["id"], "stream")))] * streaming
        layer = [_short(row["us_a_layer"])] * stacked
        layer += [_short(row["tokens_a_second"])] * counted
        made.add_row(*cells, shared.verdict(row["ok"]), *_times(row), *read, *compared, *layer)
    return made


def _many(rows: list[Row], ratios: list[Row]) -> Table:
    """Speed, memory and ratios of the rows that take many tokens at once."""
    others = [name for name in OTHERS if any(r["backend"] == name for r in ratios)]
    columns = ["kernel", "shape", "backend", "TFLOP/s", "share", "MB held"]
    columns += [f"× {name}" for name in others]
    made = shared.table(
        "many tokens at once, beside the matrix product", *columns, right=len(columns) - 3
    )
    for column in made.columns[:3]:
        column.no_wrap = True
    faster = {(r["id"], r["backend"]): r["ratio"] for r in ratios}
    for row in rows:
        speed = _short(row["gflops"] and row["gflops"] / 1e3)
        cells = [row["kernel"], row["shape"], row["backend"], speed, _share(row["share_matrix"])]
        cells.append(_short(row["peak_bytes"] and row["peak_bytes"] / 1e6))
        made.add_row(*cells, *(_short(faster.get((row["id"], name))) for name in others))
    return made


def _times(row: Row) -> list[str]:
    moved = _short(row["bytes"] / 1e6)
    if row["us"] is None:
        return ["–", "–", moved, "–", "–"]
    spread = (row["us_high"] - row["us_low"]) / 2
    speed = (_short(row["gbps"]), _share(row["share"]))
    time = _short(row["us"]) + " host" * host_bound(row["host"])
    return [time, f"±{_short(spread)}", moved, *speed]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _not_run(rows: list[Row], out: Console) -> None:
    for reason in dict.fromkeys(row["reason"] for row in rows):
        batches: dict[str, list[str]] = {}
        for row in rows:
            if row["reason"] == reason:
                name, _, batch = row["id"].removeprefix("bench.").rpartition("_b")
                batches.setdefault(name, []).append(batch)
        ids = "; ".join(f"{name}, B = {', '.join(found)}" for name, found in batches.items())
        out.print(Text(f"not run, {reason}: {ids}", "yellow"), soft_wrap=True)
