"""``gdn-jax verify``."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gdn_jax._core.environment import environment
from gdn_jax.cli.options import (
    finish,
    html_option,
    json_option,
    preset_option,
    python_option,
    tokens_option,
)
from gdn_jax.report import html, render
from gdn_jax.report.progress import stages
from gdn_jax.report.record import Report

TIERS = ("f32", "q4", "all")
SUITES = ("layer", "state", "prefill", "model", "all")
NO_USE = {
    "state": ("tier", "tokens", "oracle", "oracle_python"),
    "prefill": ("tier", "tokens"),
    "model": ("preset", "layer", "tier", "layers", "tokens", "oracle", "seed"),
}
"""Options of verify that a suite has no use for."""


@click.command()
@click.option(
    "--suite",
    type=click.Choice(SUITES),
    default="layer",
    show_default=True,
    help="One layer operator by operator, many sequences in the slots of a pool, many tokens at "
    "once, a whole model, or all of them.",
)
@preset_option
@click.option("--checkpoint", metavar="DIR", help="A Hugging Face directory instead of a preset.")
@click.option("--layer", type=int, metavar="N", help="Layer of the checkpoint.")
@click.option(
    "--tier", type=click.Choice(TIERS), default="all", show_default=True, help="Weights to verify."
)
@click.option(
    "--layers",
    type=click.IntRange(min=3),
    default=48,
    show_default=True,
    help="Layers of state; a few of them are stepped.",
)
@tokens_option
@click.option("--backend", help="Insist on a backend; by default the best available one.")
@click.option(
    "--oracle",
    metavar="shipped|live|none|FILE",
    help="What transformers computed: the file that ships for the preset (the default; --suite "
    "prefill does without where there is none), computed now, left out, or a file made by "
    "`gdn-jax oracle export`.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Of drawn weights and inputs.")
@python_option
@json_option
@html_option
@click.pass_context
def verify(
    context: click.Context,
    suite: str,
    preset: str | None,
    checkpoint: str | None,
    layer: int | None,
    tier: str,
    layers: int,
    tokens: int,
    backend: str | None,
    oracle: str | None,
    seed: int | None,
    oracle_python: str | None,
    json_file: str | None,
    html_file: str | None,
) -> int:
    """Check a layer against transformers and float64, many sequences or tokens, or a model."""
    from gdn_jax._core.backend import select_backend
    from gdn_jax.verify import subject
    from gdn_jax.verify.layer import float32, int4
    from gdn_jax.verify.model import checks as model
    from gdn_jax.verify.prefill import checks as prefill
    from gdn_jax.verify.state import sequences

    if html_file:
        html.require_report_extra()
    for name in NO_USE.get(suite, ()):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = name.replace("_", "-")
            raise click.UsageError(f"--suite {suite} has no use for --{option}")
    if suite == "model":
        return _model(checkpoint, backend, oracle_python, json_file, html_file)
    if (checkpoint is None) != (layer is None):
        raise click.UsageError("--checkpoint and --layer go together")
    suites: dict[str, list[Any]] = {
        "layer": {"f32": [float32], "q4": [int4], "all": [float32, int4]}[tier],
        "state": [sequences],
        "prefill": [prefill],
    }
    parts = suites.get(suite) or [part for parts in suites.values() for part in parts]
    if suite == "state":
        oracle = "none"
    if suite == "prefill":
        tokens = prefill.TOKENS
    whole = suite == "all" and model.BUNDLED.is_dir()
    count = 1 + sum(module.STAGES for module in parts) + whole * model.STAGES
    with stages(count) as stage:
        with stage("weights and inputs"):
            if checkpoint is None:
                chosen = subject.from_preset(
                    preset or "qwen3.5-27b",
                    tokens,
                    oracle or (None if suite == "prefill" else "shipped"),
                    seed=seed,
                    python=oracle_python,
                )
            else:
                if preset is not None:
                    raise click.UsageError("--preset and --checkpoint exclude each other")
                if oracle not in (None, "live", "none"):
                    raise click.UsageError("--checkpoint takes --oracle live or none")
                assert layer is not None
                chosen = subject.from_checkpoint(
                    checkpoint,
                    layer,
                    tokens,
                    live=oracle == "live",
                    seed=seed or 0,
                    python=oracle_python,
                )
        if int4 in parts:
            int4.check_widths(chosen.cfg)
        settings: dict[str, Any] = {
            "suite": suite,
            "layer": chosen.name,
            "config": str(chosen.cfg),
            "layers": layers,
            "backend": select_backend(
                "prefill" if suite == "prefill" else "decode", chosen.cfg, backend=backend
            ),
            "drawn": chosen.drawn,
        }
        if suite == "all":
            settings["prefill_backend"] = select_backend("prefill", chosen.cfg, backend=backend)
            settings["model"] = model.BUNDLED.name if whole else "not run: it is part of a clone"
        if suite in ("layer", "all"):
            settings |= {"tier": tier, "tokens": tokens}
        if suite != "state":
            settings["transformers"] = chosen.transformers
        report = Report(environment(), settings)
        for module in parts:
            module.run(chosen, report, layers=layers, backend=backend, stage=stage)
        if whole:
            model.run(report, backend=backend, stage=stage)
    render.render(report, render.console())
    return finish(report, json_file, html_file, f"gdn-jax verify: {chosen.name}")


def _model(
    checkpoint: str | None,
    backend: str | None,
    python: str | None,
    json_file: str | None,
    html_file: str | None,
) -> int:
    """The suite of whole models: the bundled checkpoint, or one against transformers."""
    from gdn_jax.verify.model import checks, live

    if checkpoint is None and python is not None:
        raise click.UsageError("--suite model has no use for --oracle-python without --checkpoint")
    folder = checkpoint or str(checks.BUNDLED)
    name = Path(folder).name
    settings = {"suite": "model", "model": name, "backend": backend}
    report = Report(environment(), settings)
    with stages((live if checkpoint else checks).STAGES) as stage:
        if checkpoint:
            live.run(checkpoint, report, backend=backend, stage=stage, python=python)
        else:
            checks.run(report, backend=backend, stage=stage)
    render.render(report, render.console())
    return finish(report, json_file, html_file, f"gdn-jax verify: {name}")
