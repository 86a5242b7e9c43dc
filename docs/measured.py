"""Writes the tables of measured results from ``docs/results``: README's, and docs/ladder.md.

``verify-*.json`` give README's checks, ``bench-*.json`` its times, ``generate-*.json`` what a load
takes, ``ladder.json`` the page of kernel versions. ``python docs/measured.py`` renews both; a test
asserts that they are up to date.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CARD_GBPS = {"NVIDIA H200": 4800, "NVIDIA GeForce RTX 5090": 1792}
"""By datasheet."""
REFERENCE = (
    ("best int4 matrix-vector product of the reference system", None, 964.0),
    ("its int4 layer, 73 MB a token", 156.0, 73e6 / 156e-6 / 1e9),
)
"""What it is, µs and GB/s, on an RTX 5090."""
PUBLISHED = (
    ("FlashInfer", 8192, 393.0),
    ("FlashQLA", 8192, 410.0),
    ("FlashInfer", 32768, 1557.0),
    ("FlashQLA", 32768, 1260.0),
)
"""FlashQLA's table of the chunked rule: whose, tokens of one sequence, and µs on an H200."""
PUBLISHED_OF = ("NVIDIA H200", "chunk", "48x128x128_t")
"""The device, kernel and shape that they are set beside."""
MODEL = ("model_decode", "model_prefill")
"""Kernels of whole models, which have a table to themselves."""
BATCHES = (1, 8, 64)
"""Rows that README shows; the files have all."""
LADDER_FIELDS = (
    "kernel",
    "version",
    "date",
    "device",
    "prediction",
    "result",
    "verdict",
    "reason",
)

Row = dict[str, Any]


def table() -> str:
    """One row a check, one column a device and backend, then what made each.

    Of several files that have a check of one column, the newest counts.
    """
    files, results = _results("verify")
    columns: dict[str, dict[str, Row]] = {}
    trips: dict[str, str] = {}
    for result in sorted(results, key=lambda result: result["environment"]["date"]):
        # Null in a record of the bundled model: too small for the kernels, it chose XLA itself.
        column = f"{_device(result)}, {result['settings']['backend'] or 'xla'}"
        checks = columns.setdefault(column, {})
        checks |= {check["id"]: check for check in result["checks"]}
        for trip in result.get("round_trip", []):
            trips[column] = f"{trip['median_us']:.0f}"
    columns = dict(sorted(columns.items()))
    rows = [["check", *columns, "unit"]]
    for id_ in dict.fromkeys(id_ for checks in columns.values() for id_ in checks):
        found = [checks.get(id_) for checks in columns.values()]
        unit = next(check["unit"] for check in found if check)
        rows.append([f"`{id_}`", *(_number(check and check["value"]) for check in found), unit])
    last = (_number(trips.get(column)) for column in columns)
    rows.append(["host round trip of one token, median", *last, "µs"])
    return "\n".join([*_table(rows), "", *map(_made, files, results)])


def bench_table() -> str:
    """Times by device: each kernel's Pallas row, or XLA's where it has none, then the reference."""
    files, results = _results("bench")
    lines = []
    for device in dict.fromkeys(map(_device, results)):
        mine = [result for result in results if _device(result) == device]
        lines += _times(device, mine) + _prompt_of_a_layer(mine)
    reference = [["on an RTX 5090", "µs", "GB/s", "of the card's 1792 GB/s"]]
    for what, us, gbps in REFERENCE:
        share = gbps / CARD_GBPS["NVIDIA GeForce RTX 5090"]
        reference.append([what, _number(us and f"{us:.0f}"), f"{gbps:.0f}", f"{share:.0%}"])
    made = map(_made, files, results)
    return "\n".join([*lines, *_loads(), *_table(reference), "", *made])


def ladder_page() -> str:
    """docs/ladder.md: a table a kernel, a row a version, in the order of the file."""
    columns = [field for field in LADDER_FIELDS if field not in ("kernel", "date", "device")]
    entries = ladder()
    lines = [
        "# Versions of the kernels",
        "",
        "What was expected, what was measured, and why it was",
    ]
    lines += ["was kept or dropped; times by slope, a profiler's where said.", ""]
    for kernel in dict.fromkeys(entry["kernel"] for entry in entries):
        mine = [entry for entry in entries if entry["kernel"] == kernel]
        where = {f"{entry['device']}, {entry['date']}" for entry in mine}
        rows = [columns, *([entry[field] for field in columns] for entry in mine)]
        lines += [f"## {kernel}", "", f"{'; '.join(sorted(where))}.", "", *_table(rows), ""]
    return "\n".join(lines)


def ladder() -> list[dict[str, str]]:
    """``ladder.json``."""
    return json.loads((ROOT / "docs" / "results" / "ladder.json").read_text(encoding="utf-8"))


SECTIONS: dict[str, Callable[[], str]] = {
    "measured": table,
    "bench": bench_table,
}
"""What stands between ``<!-- name -->`` and ``<!-- /name -->`` in README."""


def renewed(readme: str) -> str:
    """README with the tables between their markers replaced."""
    for name, make in SECTIONS.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        head, rest = readme.split(start)
        readme = head + start + make() + "\n" + end + rest.split(end)[1]
    return readme


def _results(kind: str) -> tuple[list[Path], list[Row]]:
    files = sorted((ROOT / "docs" / "results").glob(f"{kind}-*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert all(result["ok"] for result in results), "a result whose checks fail is not shown"
    return files, results


def _times(device: str, results: list[Row]) -> list[str]:
    """The newest row of each id, with the ratios of its own run, and what stands beside them."""
    rows: dict[str, Row] = {}
    for result in sorted(results, key=lambda result: result["environment"]["date"]):
        for row in result["bench"]:
            ratios = {r["backend"]: r["ratio"] for r in result["ratios"] if r["id"] == row["id"]}
            rows[row["id"]] = row | {"ratios": ratios}
    by_backend: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows.values():
        what = (row["kernel"], row["shape"], row["batch"])
        by_backend.setdefault(what, {})[row["backend"]] = row
    copies = (_span([result["checks"][i]["value"] for result in results]) for i in range(2))
    said = "{}; the copy `x + 1` of the same run: {} GB/s, with each call waited for {}"
    said = said.format(device, *copies)
    said += f"; the card {CARD_GBPS[device]}." if device in CARD_GBPS else "."
    models, published = _models(by_backend), _published(device, by_backend)
    return [said, "", *_kernels(device, by_backend), "", *models, *published]


def _kernels(device: str, by_backend: dict[tuple[Any, ...], dict[str, Row]]) -> list[str]:
    head = ["kernel", "shape", "B", "backend", "µs", "± half range", "GB/s", "of the copy"]
    head += ["of the blocking copy", "of the card", "of streaming only"]
    head += ["times faster than XLA", "than fla", "than jla", "error"]
    lines = [head]
    for what, found in by_backend.items():
        row = found.get("pallas") or found.get("xla")
        if row is None or row["us"] is None or row["batch"] not in BATCHES or what[0] in MODEL:
            continue
        card = CARD_GBPS.get(device)
        layer = f" ({row['us_a_layer']:.2f} a layer)" if row["us_a_layer"] else ""
        host = " (host)" if (row["host"] or 0) > 0.9 else ""
        cells = [*map(str, what), row["backend"], f"{row['us']:.2f}{layer}{host}"]
        cells += [f"{(row['us_high'] - row['us_low']) / 2:.2f}", f"{row['gbps']:.0f}"]
        shares = row["share"], row["share_blocking"], card and row["gbps"] / card
        cells += map(_percent, (*shares, row["ratios"].get("stream")))
        compared = (row["ratios"].get(other) for other in ("xla", "fla", "jla"))
        cells += [f"{ratio:.2f}" if ratio else "–" for ratio in compared]
        lines.append([*cells, f"{row['error']:.1e}"])
    return _table(lines)


def _models(by_backend: dict[tuple[Any, ...], dict[str, Row]]) -> list[str]:
    """Steps and prompts of whole models, every batch."""
    head = ["whole model", "shape", "B", "backend", "ms", "± half range", "tokens/s"]
    head += ["share of the floor", "of the matrix product", "error"]
    lines = [head]
    for what, found in by_backend.items():
        for row in found.values():
            if what[0] not in MODEL or row["us"] is None:
                continue
            prompt = row["matrix"]
            name = "a prompt to its first token" if prompt else "a step"
            half = (row["us_high"] - row["us_low"]) / 2e3
            cells = [name, row["shape"], str(row["batch"]), row["backend"]]
            cells += [f"{row['us'] / 1e3:.2f}", f"{half:.2f}", f"{row['tokens_a_second']:.1f}"]
            cells += [_percent(None if prompt else row["share"]), _percent(row["share_matrix"])]
            lines.append([*cells, f"{row['error']:.1e}"])
    if len(lines) == 1:
        return []
    floor = "The floor of a step: weights and keys read once, states read and written, "
    return [*_table(lines), "", floor + "at the copy's rate.", ""]


def _loads() -> list[str]:
    """What loading and a first answer took of time and memory."""
    head = ["loaded and asked", "prompt", "load s", "host peak GB", "device peak GB"]
    lines, made = [[*head, "s to the first token, compiling", "then tokens/s"]], []
    for file in sorted((ROOT / "docs" / "results").glob("generate-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        (answer,) = result["results"]
        times, where = answer["timings"], result["environment"]
        cells = [f"{result['model']}, {result['weights']}, {where['device']}"]
        cells += [f"{len(answer['prompt_tokens'])} of {result['sampling']['context']}"]
        cells += [f"{result['load_s']:.1f}", f"{result['load_host_peak_bytes'] / 1e9:.1f}"]
        cells += [f"{result['device_peak_bytes'] / 1e9:.2f}", f"{times['prefill']:.1f}"]
        lines.append([*cells, f"{times['tokens_per_second']:.1f}"])
        made.append(_named(file, f"{result['sampling']['max_new_tokens']} new tokens", where))
    return [*_table(lines), "", *made, ""] if made else []


def _prompt_of_a_layer(results: list[Row]) -> list[str]:
    """What a layer over many tokens reaches of a matrix product, and where its time goes."""
    parts = ("projections", "convolution", "rule", "rest")
    lines = [["int4 layer, bfloat16 products", "µs", "TFLOP/s", "of a matrix product", *parts]]
    for result in results:
        for found in result.get("prefill_parts", []):
            what = ("prefill", found["shape"], found["backend"])
            rows = result["bench"]
            row = next(r for r in rows if (r["kernel"], r["shape"], r["backend"]) == what)
            cells = [found["shape"], f"{row['us']:.0f}", f"{row['gflops'] / 1e3:.0f}"]
            cells += [_percent(row["share_matrix"]), *(_percent(found[part]) for part in parts)]
            lines.append(cells)
    return [*_table(lines), ""] if len(lines) > 1 else []


def _published(device: str, by_backend: dict[tuple[Any, ...], dict[str, Row]]) -> list[str]:
    """Our time of the chunked rule over figures that others published; none without ours."""
    where, kernel, shape = PUBLISHED_OF
    lines = [["chunked rule, one sequence", "tokens", "µs", "published µs", "ours / published"]]
    for whose, tokens, us in PUBLISHED:
        ours = by_backend.get((kernel, f"{shape}{tokens}", 1), {}).get("pallas")
        if device != where or ours is None or ours["us"] is None:
            continue
        ratio = f"{ours['us'] / us:.2f}"
        cells = [f"{whose}, published, not measured here", str(tokens), f"{ours['us']:.0f}"]
        lines.append([*cells, f"{us:.0f}", ratio])
    return [*_table(lines), ""] if len(lines) > 1 else []


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def _table(rows: Iterable[list[str]]) -> list[str]:
    head, *body = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def _device(result: Row) -> str:
    return result["environment"]["device"].split(" (")[0]


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2e}" if isinstance(value, float) else str(value)


def _made(file: Path, result: Row) -> str:
    settings = result["settings"]
    if settings.get("suites") == "prefill":
        what = f"{settings['tokens']} tokens, medians of {settings['repetitions']}"
    elif "batches" in settings:
        what = f"B = {settings['batches']}, medians of {settings['repetitions']}"
    elif "tokens" in settings:
        what = f"{settings['tokens']} tokens"
    else:
        what = f"suite {settings['suite']}"
    return _named(
        file, f"{settings.get('layer') or settings['model']}, {what}", result["environment"]
    )


def _named(file: Path, what: str, made: Row) -> str:
    commit, date = (made["commit"] or "?")[:12], made["date"][:10]
    return (
        f"[`{file.name}`](docs/results/{file.name}): {what}, "
        f"JAX {made['versions']['jax']}, commit {commit}, {date}.  "
    )


if __name__ == "__main__":
    (ROOT / "docs" / "ladder.md").write_text(ladder_page(), encoding="utf-8")
    path = ROOT / "README.md"
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
