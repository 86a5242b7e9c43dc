"""A report as one HTML file: no script, nothing fetched, light and dark, plots inline."""

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdn_jax._core.files import write_atomically
from gdn_jax.errors import GDNError
from gdn_jax.report.numbers import number
from gdn_jax.report.record import Row, projection_total

if TYPE_CHECKING:
    from gdn_jax.report.plots import Plot

_HEAD = ("ok", "environment", "settings", "checks")
_KNOWN = {
    "tokens": (
        "Token by token",
        "Distance of the layer's output: max_rel is the largest absolute error over the largest "
        "absolute reference value, rms_rel the norm of the error over the norm of the reference.",
    ),
    "operators": (
        "Operator by operator",
        "Every operator by itself; the worst head is the one whose max_rel, normalised by that "
        "head alone, is largest. XC is the raw qkv projection, Z the gate, B and A the raw b and "
        "a, BETA sigmoid(b), G the log decay, XCV the convolved qkv, Q and K the normalised ones, "
        "ON the output of the delta rule, ONN of the gated norm, OUT of the layer; S and HIST are "
        "the new state.",
    ),
    "state": ("Size of the state", "From the arrays themselves, for one sequence."),
    "round_trip": (
        "Cost of a host round trip",
        "Median and interquartile range over the repetitions; a time near the clock's resolution "
        "says only that it is small.",
    ),
    "drift": ("Drift over a long run", "The numbers behind the plot."),
    "decay": ("Decay and state by head", "The numbers behind the plots."),
    "projections": (
        "int4: each projection alone",
        "int4 weights against float64 with the original weights, on the inputs that the float32 "
        "layer gives them. Activations are float32, but for the one column where they are q8.",
    ),
    "q4_tokens": (
        "int4: token by token",
        "Distance of the int4 layer's output to the float32 layer's with the original weights: the "
        "cost of four bits, without a limit for a single token.",
    ),
    "q4_operators": (
        "int4: operator by operator",
        "To float32 with the original weights: the cost of four bits. To float64 and float32 with "
        "the same weights, decoded by the gguf package: the int4 path alone.",
    ),
    "q4_groups": ("int4: group size and rule", "The numbers behind the plot."),
    "q4_drift": ("int4: the cost over a long run", "The numbers behind the plot."),
    "prefill": (
        "Many tokens at once",
        "max_rel of the outputs, of the state after them and of the convolution's history, case by "
        "case; where bits or zeros are asked for, 0 when they are there, else infinite.",
    ),
    "model": (
        "A whole model, part by part",
        "Every layer on what transformers gives to its own, so that an error stays in the layer "
        "that makes it.",
    ),
    "bench": (
        "Times",
        "Medians in microseconds of one call, with the extremes over the repetitions: by slope, "
        "the difference of a long and a short queue of calls, or blocking, each call waited for. "
        "bytes are the least to be read and written, gbps is bytes over time, share is of the "
        "copy in this run, and a stack's time is a token through all its layers. A row whose "
        "check fails has no time.",
    ),
    "ratios": ("Ratios", "How many times faster the Pallas kernel is than the other, same run."),
    "not_run": ("Not run", "Asked for, and why it is not there."),
}
_GRIDS = ("operators", "q4_operators")
_OPEN_ROWS = 48
_MIB = 2**20


class ReportExtraError(GDNError, ImportError):
    """The libraries that draw the HTML report are not installed."""


def require_report_extra() -> None:
    """Raise ReportExtraError unless matplotlib can be imported."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ReportExtraError(
            "the HTML report needs matplotlib: pip install 'gdn-jax[report]'"
        ) from None


def render_html(
    data: Mapping[str, Any], *, title: str, plots: Sequence["Plot"] | None = None
) -> str:
    """The page of :meth:`Report.as_dict` with these plots, verify's by default.

    Equal data give equal text. Tables that the page has no heading for follow under their own
    names, and other values under "Further values", so a report of any command can be rendered.

    Raises:
        ReportExtraError: matplotlib is missing.
    """
    require_report_extra()
    import jinja2
    from markupsafe import Markup

    from gdn_jax.report.plots import PLOTS, render_plots

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=number, text=_text, mib=_mib)
    environment.globals.update(columns=_columns, open_rows=_OPEN_ROWS)
    template = environment.from_string(Path(__file__).with_name("report.html").read_text("utf-8"))
    rest = {key: value for key, value in data.items() if key not in _HEAD}
    tables = {key: value for key, value in rest.items() if value and _is_table(value)}
    if "projections" in tables:
        tables["projections"] = [*tables["projections"], projection_total(tables["projections"])]
    names = [name for name in _KNOWN if name in tables]
    names += [name for name in tables if name not in _KNOWN]
    return template.render(
        title=title,
        ok=data["ok"],
        checks=data["checks"],
        failed=[check["id"] for check in data["checks"] if not check["ok"]],
        facts={
            "Environment": data["environment"],
            "Settings": data["settings"],
            "Further values": {k: v for k, v in rest.items() if not _is_table(v)},
        },
        plots=[(plot, Markup(svg)) for plot, svg in render_plots(data, plots or PLOTS)],
        tables=[(name, *_heading(name), tables[name]) for name in names],
        grids={name: _operator_grid(tables.get(name, [])) for name in _GRIDS},
    )


def write_html(
    path: str | os.PathLike[str],
    data: Mapping[str, Any],
    title: str,
    plots: Sequence["Plot"] | None = None,
) -> None:
    """Write :func:`render_html` to a file, atomically."""
    write_atomically(path, render_html(data, title=title, plots=plots).encode())


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _heading(name: str) -> tuple[str, str]:
    return _KNOWN.get(name, (name.replace("_", " "), ""))


def _columns(rows: list[Row]) -> list[str]:
    """The keys of all rows, in the order in which they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _operator_grid(rows: list[Row]) -> Row:
    """One line for each operator: for each pair, the first and last token and the worst head."""
    if not rows:
        return {}
    tokens = [row["token"] for row in rows]
    first, last = min(tokens), max(tokens)
    cells: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        cells.setdefault(row["operator"], {}).setdefault(row["pair"], []).append(row)
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    lines = []
    for operator, by_pair in cells.items():
        line: list[str] = []
        for pair in pairs:
            found = by_pair.get(pair, [])
            at = {row["token"]: row for row in found}
            ends = ((first, "max_rel"), (first, "rms_rel"), (last, "rms_rel"))
            line += [number(at.get(token, {}).get(key)) for token, key in ends]
            line.append(_worst(found))
        lines.append((operator, line))
    return {"first": first, "last": last, "pairs": pairs, "lines": lines}


def _worst(rows: list[Row]) -> str:
    heads = [row for row in rows if row["worst_head"] is not None]
    if not heads:
        return "–"
    worst = max(heads, key=lambda row: _rank(row["worst_head_rel"]))
    return f"{worst['worst_head']}: {number(worst['worst_head_rel'])}"


def _rank(value: Any) -> float:
    rank = float(value)
    return math.inf if math.isnan(rank) else rank


def _text(value: Any) -> str:
    """A value of the environment or the settings as text; lists and mappings in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "–"
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else number(value)


def _mib(value: Any) -> str:
    if not isinstance(value, int):
        return "–"
    return f"{value / _MIB:,.1f}" if value >= 10 * _MIB else f"{value / _MIB:.3g}"
