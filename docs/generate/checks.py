"""docs/checks.md: every check of the catalogue, with the limits of the recorded runs."""

from docs.generate.markdown import table
from docs.generate.measured import FAMILIES
from docs.generate.records import records
from gdn_jax.verify.catalogue import CATALOGUE

INTRO = """# What is checked

`gdn-jax verify` runs these. Each says what passing it shows and what it does not show.
Limits are those of the recorded runs ([values](results.md)); a limit of 0 asks for equal bits.
`max_rel` is the largest difference over the largest value of the reference.
"""
SUITES = {
    ("f32", "f16"): "`gdn-jax verify`, and `--tier f32` alone.",
    ("q4",): "`gdn-jax verify`, and `--tier q4` alone.",
    ("state",): "`gdn-jax verify --suite state`.",
    ("prefill",): "`gdn-jax verify --suite prefill`.",
    ("model",): "`gdn-jax verify --suite model`; with `--checkpoint DIR` a real model against an "
    "installed `transformers`, layer by layer.",
}


def checks_page() -> str:
    """A table a family."""
    limits: dict[str, dict[str, float]] = {}
    for record in records("verify"):
        for check in record.data["checks"]:
            limits.setdefault(check["id"], {})[record.device] = check["limit"]
    lines = [INTRO]
    for prefixes, heading in FAMILIES.items():
        rows = [
            [f"`{id_}`", shows, shows_not, _limit(limits.get(id_, {}))]
            for id_, (_, shows, shows_not) in CATALOGUE.items()
            if id_.split(".")[0] in prefixes
        ]
        head = ["check", "shows", "does not show", "limit"]
        lines += [f"## {heading}", "", SUITES[prefixes], "", *table(head, rows)]
    return "\n".join(lines)


def _limit(limits: dict[str, float]) -> str:
    """One limit, or one a device where they differ."""
    if not limits:
        return "no recorded run"
    each = {device: f"{limit:.2g}" for device, limit in sorted(limits.items())}
    if len(set(each.values())) == 1:
        return next(iter(each.values()))
    return ", ".join(f"{limit} ({device})" for device, limit in each.items())
