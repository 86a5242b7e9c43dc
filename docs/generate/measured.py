"""docs/results.md, first half: the values of the checks, a table a family."""

from pathlib import Path

from docs.generate.markdown import number, table
from docs.generate.records import RESULTS, Record, Row, records

FAMILIES = {
    ("f32", "f16"): "A layer in float32",
    ("q4",): "A layer in int4",
    ("state",): "Many sequences",
    ("prefill",): "Many tokens at once",
    ("model",): "A whole model",
}
"""Prefixes of ids, and the heading of their table."""


def checks_measured(folder: Path = RESULTS) -> list[str]:
    """One row a check, one column a device and backend that ran the family; the newest counts."""
    found = records("verify", folder)
    lines = []
    for prefixes, heading in FAMILIES.items():
        columns: dict[str, dict[str, Row]] = {}
        for record in found:
            mine = [check for check in record.data["checks"] if _prefix(check) in prefixes]
            if mine:
                columns.setdefault(record.column, {}).update({c["id"]: c for c in mine})
        columns = dict(sorted(columns.items()))
        rows = []
        for id_ in dict.fromkeys(id_ for checks in columns.values() for id_ in checks):
            cells = [checks.get(id_) for checks in columns.values()]
            unit = next(check["unit"] for check in cells if check)
            rows.append([f"`{id_}`", *(number(check and check["value"]) for check in cells), unit])
        lines += [f"### {heading}", "", *table(["check", *columns, "unit"], rows)]
    return [*lines, *_trips(found), *(record.source(_what(record)) for record in found), ""]


def _prefix(check: Row) -> str:
    return check["id"].split(".")[0]


def _trips(found: list[Record]) -> list[str]:
    rows = [
        [record.column, f"{trip['median_us']:.0f}", str(trip["repetitions"])]
        for record in sorted(found, key=lambda record: record.column)
        for trip in record.data.get("round_trip", [])
    ]
    head = ["one token to the device and back", "median µs", "repetitions"]
    return ["### The round trip to the host", "", *table(head, rows)]


def _what(record: Record) -> str:
    settings = record.data["settings"]
    what = f"{settings['tokens']} tokens" if "tokens" in settings else f"suite {settings['suite']}"
    return f"{settings.get('layer') or settings['model']}, {what}"
