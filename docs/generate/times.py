"""docs/results.md, second half: times by kind, each row behind its own check."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from docs.generate.markdown import NONE, percent, span, table
from docs.generate.records import RESULTS, Record, Row, records

CARD_GBPS = {"NVIDIA H200": 4800, "NVIDIA GeForce RTX 5090": 1792}
"""By datasheet."""
BATCHES = (1, 8, 64)
"""Rows that are shown; the files have all."""

Cell = Callable[[Row], str]


def _ratio(to: str) -> Cell:
    return lambda row: f"{row['ratios'][to]:.2f}" if row["ratios"].get(to) else NONE


def _name(row: Row) -> str:
    return row["kernel"] if row["backend"] == "pallas" else f"{row['kernel']} ({row['backend']})"


def _us(row: Row) -> str:
    half = (row["us_high"] - row["us_low"]) / 2
    layer = f" ({row['us_a_layer']:.2f} a layer)" if row["us_a_layer"] else ""
    host = " (host)" if (row["host"] or 0) > 0.9 else ""
    return f"{row['us']:.2f} ± {half:.2f}{layer}{host}"


CELLS: dict[str, Cell] = {
    "kernel": _name,
    "shape": lambda row: row["shape"],
    "B": lambda row: str(row["batch"]),
    "µs": _us,
    "ms": lambda row: f"{row['us'] / 1e3:.2f} ± {(row['us_high'] - row['us_low']) / 2e3:.2f}",
    "GB/s": lambda row: f"{row['gbps']:.0f}",
    "TFLOP/s": lambda row: f"{row['gflops'] / 1e3:.0f}",
    "tokens/s": lambda row: f"{row['tokens_a_second']:.1f}",
    "of the copy": lambda row: percent(row["share"]),
    "of the floor": lambda row: percent(row["share"]),
    "of the card": lambda row: percent(row["gbps"] / row["card"]) if row["card"] else NONE,
    "of a matrix product": lambda row: percent(row["share_matrix"]),
    "of streaming alone": lambda row: percent(row["ratios"].get("stream")),
    "times faster than XLA": _ratio("xla"),
    "than fla": _ratio("fla"),
    "than jla": _ratio("jla"),
    "error": lambda row: f"{row['error']:.1e}",
}
"""A column of a table of times, and what stands in it; ± is half the range."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Kernels that share a table: what its columns are, and what is said below it."""

    title: str
    kernels: tuple[str, ...]
    columns: tuple[str, ...]
    note: str = ""
    all_batches: bool = False


REST = ("kernel", "shape", "B", "µs", "GB/s", "of the copy", "times faster than XLA", "error")
RATIOS = ("than fla", "than jla")
MANY = ("kernel", "shape", "µs", "TFLOP/s", "of a matrix product", "of the copy", "error")
KINDS = (
    Kind(
        "int4 products",
        ("stream", "int4"),
        ("kernel", "shape", "B", "µs", "GB/s", "of the copy", "of streaming alone", "error"),
        "`stream` reads the same bytes and does nothing with them.",
    ),
    Kind(
        "The state of one token",
        ("delta", "middle"),
        ("kernel", "shape", "B", "µs", "GB/s", "of the copy", "than fla", "error"),
        "`than fla`: how many times faster than flash-linear-attention in the same run.",
    ),
    Kind(
        "One token of a layer",
        ("layer_f32", "layer_bf16", "layer_q4"),
        ("kernel", "shape", "B", "µs", "GB/s", "of the copy", "of the card", "error"),
    ),
    Kind(
        "The chunked rule",
        ("chunk",),
        ("shape", "µs", "TFLOP/s", "of a matrix product", "of the copy", *RATIOS, "error"),
        "How many times faster than flash-linear-attention and than jax-linear-attention, in the "
        "same run; operands in bfloat16.",
    ),
    Kind(
        "Many tokens of a layer",
        ("prefill", "prefill_projections", "prefill_convolution", "prefill_rule"),
        MANY,
    ),
    Kind("The chunked rule in float32, and packed", ("chunk_f32", "chunk_packed"), MANY),
    Kind(
        "A step of a whole model",
        ("model_decode",),
        ("shape", "B", "ms", "tokens/s", "of the floor", "error"),
        "The floor: weights and keys read once, states read and written, at the copy's rate. "
        "In a shape, l are layers, v words of the vocabulary, p tokens before the step.",
        all_batches=True,
    ),
    Kind(
        "A prompt of a whole model to its first token",
        ("model_prefill",),
        ("shape", "B", "ms", "tokens/s", "of a matrix product", "error"),
        all_batches=True,
    ),
)


def times(folder: Path = RESULTS) -> list[str]:
    """A heading a device, under it a table a kind, from the newest row of each id."""
    found = records("bench", folder)
    lines = []
    for device in dict.fromkeys(record.device for record in found):
        mine = [record for record in found if record.device == device]
        rows = newest(mine)
        lines += [f"### {device}", "", _copies(device, mine), ""]
        for kind in kinds_of(rows):
            shown = [row for row in rows if shows(kind, row)]
            cells = [[CELLS[column](row) for column in kind.columns] for row in shown]
            if cells:
                lines += [f"#### {kind.title}", "", *table(kind.columns, cells)]
                lines += [kind.note, ""] if kind.note else []
    return [*lines, *(record.source(_what(record)) for record in found), ""]


def newest(found: list[Record]) -> list[Row]:
    """Each kernel's Pallas row, or XLA's where it has none, with the ratios of its own run."""
    rows: dict[str, Row] = {}
    for record in found:
        for row in record.data["bench"]:
            mine = [r for r in record.data["ratios"] if r["id"] == row["id"]]
            more = {"ratios": {r["backend"]: r["ratio"] for r in mine}}
            rows[row["id"]] = row | more | {"card": CARD_GBPS.get(record.device)}
    by_backend: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows.values():
        what = (row["kernel"], row["shape"], row["batch"])
        by_backend.setdefault(what, {})[row["backend"]] = row
    chosen = (rows.get("pallas") or rows.get("xla") for rows in by_backend.values())
    return [row for row in chosen if row is not None and row["us"] is not None]


def kinds_of(rows: list[Row]) -> list[Kind]:
    """:data:`KINDS`, and one more for the kernels that none of them names."""
    named = {kernel for kind in KINDS for kernel in kind.kernels}
    other = dict.fromkeys(row["kernel"] for row in rows if row["kernel"] not in named)
    return [*KINDS, *([Kind("Others", tuple(other), REST)] if other else [])]


def shows(kind: Kind, row: Row) -> bool:
    """Whether a row stands in the table of a kind."""
    return row["kernel"] in kind.kernels and (kind.all_batches or row["batch"] in BATCHES)


def _copies(device: str, found: list[Record]) -> str:
    copy, blocking = (span([r.data["checks"][i]["value"] for r in found]) for i in range(2))
    card = f"; the card has {CARD_GBPS[device]}" if device in CARD_GBPS else ""
    return (
        f"The copy `x + 1` of the same run: {copy} GB/s, "
        f"with each call waited for {blocking}{card}."
    )


def _what(record: Record) -> str:
    settings = record.data["settings"]
    prefill = settings.get("suites") == "prefill"
    sizes = f"{settings['tokens']} tokens" if prefill else f"B = {settings['batches']}"
    return f"{settings['layer']}, {sizes}, medians of {settings['repetitions']}"
