"""A report on the terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gdn_jax.report.numbers import number
from gdn_jax.report.record import Check, Report, Row, projection_total

_MIN_WIDTH = 100
_DRIFT_TOKENS = (0, 1, 8, 64)


def console() -> Console:
    """Standard output, at least 100 columns wide where it is not a terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, _MIN_WIDTH))


def render(report: Report, out: Console) -> None:
    """Print the whole report: environment, tables, checks, verdict."""
    render_head(report, out)
    tables = report.tables
    if "state" in tables:
        out.print(_state(tables["state"]))
    if "tokens" in tables:
        out.print(_tokens("The layer's output, token by token", tables["tokens"]))
    _operator_tables(tables.get("operators", []), out)
    if "projections" in tables:
        out.print(_projections(tables["projections"]))
    if "q4_tokens" in tables:
        title = "The int4 layer's output to the float32 layer's, original weights"
        out.print(_tokens(title, tables["q4_tokens"]))
    _operator_tables(tables.get("q4_operators", []), out)
    if "q4_groups" in tables:
        out.print(_groups(tables["q4_groups"]))
    if "q4_drift" in tables:
        out.print(_drift(tables["q4_drift"]))
    if "prefill" in tables:
        out.print(_prefill(tables["prefill"]))
    if "model" in tables:
        out.print(_model(tables["model"]))
    _checks(report.checks, out)
    render_verdict(report, out)


def render_head(report: Report, out: Console) -> None:
    """Print environment and settings."""
    out.print(_pairs("Environment", _flat(report.environment)))
    out.print(_pairs("Settings", report.settings))


def render_verdict(report: Report, out: Console) -> None:
    """Print the last line."""
    count = sum(check.ok for check in report.checks)
    word, style = ("PASS", "bold green") if report.ok else ("FAIL", "bold red")
    out.print(Text(f"{word}: {count} of {len(report.checks)} checks hold", style))


def table(title: str, *columns: str, right: int = 0) -> Table:
    """An empty table whose last ``right`` columns are numbers."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i >= len(columns) - right else "left")
    return made


def verdict(ok: bool | None) -> Text:
    """The verdict as a coloured word."""
    if ok is None:
        return Text("–")
    return Text("ok", "green") if ok else Text("FAIL", "bold red")


def _flat(environment: dict[str, Any]) -> dict[str, Any]:
    versions = " ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return {**environment, "versions": versions}


def _pairs(title: str, pairs: dict[str, Any]) -> Table:
    made = table(title, "what", "found")
    for name, value in pairs.items():
        if value is not None:
            made.add_row(name.replace("_", " "), str(value))
    return made


def _state(rows: list[Row]) -> Table:
    made = table("State, from the arrays' own sizes", "part", "shape", "bytes", "MiB", right=2)
    for row in rows:
        made.add_row(
            row["part"], Text(row["shape"]), number(row["bytes"]), f"{row['bytes'] / 2**20:.1f}"
        )
    return made


def _tokens(title: str, rows: list[Row]) -> Table:
    columns = ("pair", "token", "max_abs_err", "max_abs_ref", "max_rel", "verdict")
    made = table(title, *columns, right=5)
    for row in rows:
        values = (number(row[name]) for name in columns[1:-1])
        made.add_row(row["pair"], *values, verdict(row["ok"]))
    return made


def _operator_tables(rows: list[Row], out: Console) -> None:
    for pair in dict.fromkeys(row["pair"] for row in rows):
        out.print(_operators(pair, [row for row in rows if row["pair"] == pair]))


def _operators(pair: str, rows: list[Row]) -> Table:
    """First and last token of every operator; of transformers, S and HIST have only the last."""
    first, last = (end(row["token"] for row in rows) for end in (min, max))
    columns = ["operator", *(f"{m} at {t}" for t in (first, last) for m in ("max_rel", "rms_rel"))]
    made = table(
        f"Operators, {pair}, at tokens {first} and {last}", *columns, "worst head", right=5
    )
    for operator in dict.fromkeys(row["operator"] for row in rows):
        mine = {row["token"]: row for row in rows if row["operator"] == operator}
        worst = max(mine.values(), key=lambda row: row["worst_head_rel"] or 0.0)
        cells = [
            number(mine[token][metric]) if token in mine else "–"
            for token in (first, last)
            for metric in ("max_rel", "rms_rel")
        ]
        head = worst["worst_head"]
        place = "–" if head is None else f"{worst['worst_head_rel']:.1e} in {head}"
        made.add_row(operator, *cells, place)
    return made


def _projections(rows: list[Row]) -> Table:
    columns = ("projection", "max_rel", "rms_rel", "rms_rel, q8 activations")
    columns += ("float32 MiB", "int4 MiB", "ratio")
    title = "Projections alone, int4 to float64 with the original weights"
    made = table(title, *columns, right=6)
    for row in [*rows, projection_total(rows)]:
        errors = (row.get(key) for key in ("max_rel", "rms_rel", "rms_rel_q8_activations"))
        sizes = (_mib(row[key]) for key in ("float32_MiB", "int4_MiB"))
        made.add_row(row["projection"], *map(number, errors), *sizes, f"{row['ratio']:.2f}")
    return made


def _mib(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _groups(rows: list[Row]) -> Table:
    """A table with a line for each rule and a column for each group size."""
    sizes = {row["group"]: f"{row['group']} ({row['bits']:g} bits)" for row in rows}
    title = "in_proj_qkv, stored to original: rms_rel"
    made = table(title, "rule", *sizes.values(), right=len(sizes))
    for rule in dict.fromkeys(row["rule"] for row in rows):
        found = {row["group"]: row["rms_rel"] for row in rows if row["rule"] == rule}
        made.add_row(rule, *(number(found.get(size)) for size in sizes))
    return made


def _drift(rows: list[Row]) -> Table:
    keys = ("max_rel", "rms_rel", "S_rms_rel")
    made = table(f"int4 to float32, small layer, {len(rows)} tokens", "token", *keys, right=4)
    for row in rows:
        if row["token"] in (*_DRIFT_TOKENS, rows[-1]["token"]):
            made.add_row(str(row["token"]), *(number(row[key]) for key in keys))
    return made


def _prefill(rows: list[Row]) -> Table:
    keys = ("out", "S", "history")
    made = table("Many tokens at once: max_rel", "check", "case", *keys, "verdict", right=4)
    for row in rows:
        cells = (number(row[key]) for key in keys)
        made.add_row(row["check"], row["case"], *cells, verdict(row["ok"]))
    return made


def _model(rows: list[Row]) -> Table:
    title = "Each part on transformers' own input"
    made = table(title, "part", "kind", "max_rel", "rms_rel", "verdict", right=3)
    for row in rows:
        cells = (number(row[key]) for key in ("max_rel", "rms_rel"))
        made.add_row(row["part"], row["kind"], *cells, verdict(row["ok"]))
    return made


def _checks(checks: list[Check], out: Console) -> None:
    out.print(Text("Checks", "bold"))
    for check in checks:
        measured = f"{number(check.value)} {check.unit}, limit {number(check.limit)}; "
        head = ("  ", verdict(check.ok), f"  {check.id}  ", measured + check.detail)
        out.print(Text.assemble(*head), soft_wrap=True)
        said = f"      shows {check.shows}; not {check.shows_not}"
        out.print(Text(said, "dim"), soft_wrap=True)
    out.print()
