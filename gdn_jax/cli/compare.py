"""What ``gdn-jax perplexity`` does: one text, and a row for every kind of weights."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from gdn_jax._core.environment import environment
from gdn_jax.cli.info import write_json
from gdn_jax.cli.loading import loaded
from gdn_jax.models.generation.perplexity import CHUNK, measure
from gdn_jax.report.progress import bar
from gdn_jax.report.record import Row, finite
from gdn_jax.report.render import console, table


def compare(
    model: str,
    kinds: Iterable[str],
    ids: Sequence[int],
    size: int,
    *,
    context: int | None,
    stride: int | None,
    backend: str | None,
    json_file: str | None,
) -> int:
    """Measure a text of ``size`` bytes with each kind of weights and print a table of them."""
    rows: list[Row] = []
    for kind in kinds:
        this = loaded(model, kind, backend)
        started = time.perf_counter()
        with bar() as update:
            found = measure(
                this,
                ids,
                context=context,
                stride=stride,
                chunk=CHUNK,
                progress=lambda done, total, kind=kind: update(f"{kind}, tokens", done, total),
            )
        seconds = time.perf_counter() - started
        rows.append(
            {
                "weights": kind,
                "bytes": this.params.nbytes,
                "tokens": found.tokens,
                "nll": found.nll,
                "perplexity": found.perplexity,
                "bits_per_byte": found.nll * found.tokens / math.log(2) / size,
                "ratio": math.exp(min(found.nll - rows[0]["nll"], 700)) if rows else 1.0,
                "seconds": seconds,
            }
        )
        del this
    settings = {"model": model, "text_bytes": size, "context": context, "stride": stride}
    _print(rows, settings, console())
    if json_file:
        head: dict[str, Any] = {"environment": environment(), "chunk": CHUNK, **settings}
        write_json(json_file, finite(head | {"rows": rows}))
    return 0


def _print(rows: Sequence[Row], settings: Row, out: Console) -> None:
    columns = ("weights", "MiB", "tokens", "nats a token", "perplexity", "bits a byte")
    last = f"to {rows[0]['weights']}"
    windows = "one sequence"
    if settings["context"] is not None:
        stride = settings["stride"] or max(1, settings["context"] // 2)
        windows = f"windows of {settings['context']} every {stride} tokens"
    made = table(f"{settings['model']}, {windows}", *columns, last, right=6)
    for row in rows:
        made.add_row(
            row["weights"],
            f"{row['bytes'] / 2**20:.1f}",
            str(row["tokens"]),
            f"{row['nll']:.4f}",
            f"{row['perplexity']:.4g}",
            f"{row['bits_per_byte']:.4f}",
            f"{100 * (row['ratio'] - 1):+.2f} %",
        )
    out.print(made)
