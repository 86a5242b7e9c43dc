"""docs/results.md, last: where a prefill's time goes, what a load takes, and others' figures."""

from pathlib import Path

from docs.generate.markdown import NONE, percent, table
from docs.generate.records import RESULTS, Row, records
from docs.generate.times import CARD_GBPS, newest

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


def parts_of_a_prefill(folder: Path = RESULTS) -> list[str]:
    """What a layer over many tokens reaches of a matrix product, and where its time goes."""
    parts = ("projections", "convolution", "rule", "rest")
    rows = []
    for record in records("bench", folder):
        for part in record.data.get("prefill_parts", []):
            what = ("prefill", part["shape"], part["backend"])
            row = next(r for r in record.data["bench"] if _what(r) == what)
            cells = [part["shape"], f"{row['us']:.0f}", f"{row['gflops'] / 1e3:.0f}"]
            cells += [percent(row["share_matrix"]), *(percent(part[name]) for name in parts)]
            rows.append(cells)
    head = ["int4 layer, bfloat16 products", "µs", "TFLOP/s", "of a matrix product", *parts]
    return table(head, rows)


def loads(folder: Path = RESULTS) -> list[str]:
    """What loading and a first answer took of time and memory."""
    rows, sources = [], []
    for record in records("generate", folder):
        data = record.data
        (answer,) = data["results"]
        asked = f"{len(answer['prompt_tokens'])} of {data['sampling']['context']}"
        cells = [f"{data['model']}, {data['weights']}, {record.device}", asked]
        cells += [f"{data['load_s']:.1f}", f"{data['load_host_peak_bytes'] / 1e9:.1f}"]
        cells += [f"{data['device_peak_bytes'] / 1e9:.2f}", f"{answer['timings']['prefill']:.1f}"]
        rows.append([*cells, f"{answer['timings']['tokens_per_second']:.1f}"])
        sources.append(record.source(f"{data['sampling']['max_new_tokens']} new tokens"))
    head = ["loaded and asked", "prompt", "load s", "host peak GB", "device peak GB"]
    head += ["s to the first token, compiling", "then tokens/s"]
    return [*table(head, rows), *sources, ""] if rows else []


def published(folder: Path = RESULTS) -> list[str]:
    """Our time of the chunked rule over figures that others published; none without ours."""
    device, kernel, shape = PUBLISHED_OF
    found = [record for record in records("bench", folder) if record.device == device]
    ours = {row["shape"]: row for row in newest(found) if row["kernel"] == kernel}
    rows = []
    for whose, tokens, us in PUBLISHED:
        row = ours.get(f"{shape}{tokens}")
        if row is not None and row["batch"] == 1:
            cells = [f"{whose}, published, not measured here", str(tokens), f"{row['us']:.0f}"]
            rows.append([*cells, f"{us:.0f}", f"{row['us'] / us:.2f}"])
    head = ["chunked rule, one sequence", "tokens", "µs", "published µs", "ours / published"]
    return table(head, rows)


def reference() -> list[str]:
    """What the reference system reaches on its own card."""
    card = CARD_GBPS["NVIDIA GeForce RTX 5090"]
    rows = [
        [what, f"{us:.0f}" if us else NONE, f"{gbps:.0f}", percent(gbps / card)]
        for what, us, gbps in REFERENCE
    ]
    return table(["on an RTX 5090", "µs", "GB/s", f"of the card's {card} GB/s"], rows)


def _what(row: Row) -> tuple[str, str, str]:
    return (row["kernel"], row["shape"], row["backend"])
