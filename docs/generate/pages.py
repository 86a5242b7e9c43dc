"""Every generated page by its path from the root, and README."""

from collections.abc import Callable

from docs.generate.beside import loads, parts_of_a_prefill, published, reference
from docs.generate.checks import checks_page
from docs.generate.command_line import command_line_page
from docs.generate.floors import floors_renewed
from docs.generate.ladder import ladder_page
from docs.generate.measured import checks_measured
from docs.generate.numbers import renewed
from docs.generate.records import ROOT
from docs.generate.times import times

RESULTS_HEAD = """# Results

Every number here is read from a file of [`docs/results`](results/bench-h200-model.json): the JSON
that `gdn-jax verify`, `bench` and `generate` wrote, with device, versions, commit and date.
[What is checked](checks.md) says what each check shows.

## Values of the checks

![Error of a layer's output over 512 tokens](figures/drift.svg)
"""
TIMES_HEAD = """## Times

Medians of one call by slope: the difference between a long and a short queue of calls, each kernel
of a chain on weights or a state of its own; ± is half the range. Every row stands behind a check
against float64 made in the same run, a whole model's against float32 on XLA; the files have all
batches, extremes and bytes. Whole models have drawn weights, and the checkpoint that was loaded has
holes of the 27B's sizes.

![Share of the copy's bandwidth that each kernel and layer reaches](figures/bandwidth.svg)

![Tokens a second of the 27B in int4, over the batch and over the context](figures/tokens.svg)
"""


def results_page() -> str:
    """docs/results.md."""
    lines = [RESULTS_HEAD, *checks_measured(), TIMES_HEAD, *times()]
    lines += ["### Where the time of a prefill goes", "", *parts_of_a_prefill()]
    lines += ["### Loading a model", "", *loads()]
    lines += ["### Beside figures of others", "", *published(), *reference()]
    return "\n".join(lines)


def _now(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


PAGES: dict[str, Callable[[], str]] = {
    "README.md": lambda: renewed(_now("README.md")),
    "docs/architecture.md": lambda: floors_renewed(_now("docs/architecture.md")),
    "docs/results.md": results_page,
    "docs/ladder.md": ladder_page,
    "docs/checks.md": checks_page,
    "docs/cli.md": command_line_page,
}
"""A page by hand with a generated part is renewed from what it is now."""
