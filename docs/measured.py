"""Writes README's table of measured results from ``docs/results/verify-*.json``.

``python docs/measured.py`` renews README.md; a test asserts that it is up to date.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- measured -->\n", "<!-- /measured -->"


def table() -> str:
    """One row a check, one column a result file, then what made each."""
    files = sorted((ROOT / "docs" / "results").glob("verify-*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert all(result["ok"] for result in results), "a result whose checks fail is not shown"
    named = [{check["id"]: check for check in result["checks"]} for result in results]
    rows = [["check", *(_device(result) for result in results), "unit"]]
    rows.append(["---"] * len(rows[0]))
    for id_ in dict.fromkeys(id_ for checks in named for id_ in checks):
        found = [_number(checks.get(id_, {}).get("value")) for checks in named]
        rows.append([f"`{id_}`", *found, next(c[id_]["unit"] for c in named if id_ in c)])
    trips = [f"{result['round_trip'][0]['median_us']:.0f}" for result in results]
    rows.append(["host round trip of one token, median", *trips, "µs"])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(_made(f, r) for f, r in zip(files, results, strict=True))])


def renewed(readme: str) -> str:
    """README with the table between its markers replaced."""
    head, rest = readme.split(START)
    return head + START + table() + "\n" + END + rest.split(END)[1]


def _device(result: dict[str, Any]) -> str:
    return result["environment"]["device"].split(" (")[0]


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2e}" if isinstance(value, float) else str(value)


def _made(file: Path, result: dict[str, Any]) -> str:
    made, settings = result["environment"], result["settings"]
    commit, date = (made["commit"] or "?")[:12], made["date"][:10]
    return (
        f"[`{file.name}`](docs/results/{file.name}): {settings['layer']}, {settings['tokens']} "
        f"tokens, JAX {made['versions']['jax']}, commit {commit}, {date}.  "
    )


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
