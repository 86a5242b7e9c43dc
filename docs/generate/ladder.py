"""docs/ladder.md: the versions of the kernels, a table a kernel, a row a version."""

import json

from docs.generate.markdown import table
from docs.generate.records import RESULTS

FIELDS = ("kernel", "version", "date", "device", "prediction", "result", "verdict", "reason")


def ladder() -> list[dict[str, str]]:
    """``ladder.json``."""
    return json.loads((RESULTS / "ladder.json").read_text(encoding="utf-8"))


def ladder_page() -> str:
    """In the order of the file."""
    columns = [field for field in FIELDS if field not in ("kernel", "date", "device")]
    entries = ladder()
    lines = [
        "# Versions of the kernels",
        "",
        "What each version was expected to take, what it took, and why it was kept or dropped.",
        "Times are by slope, a profiler's where a row says so.",
        "",
    ]
    for kernel in dict.fromkeys(entry["kernel"] for entry in entries):
        mine = [entry for entry in entries if entry["kernel"] == kernel]
        where = sorted({f"{entry['device']}, {entry['date']}" for entry in mine})
        rows = [[entry[field] for field in columns] for entry in mine]
        lines += [f"## {kernel}", "", f"{'; '.join(where)}.", "", *table(columns, rows)]
    return "\n".join(lines)
