"""``gdn-jax verify``."""

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
from gdn_jax.report.record import Report
from gdn_jax.verify.suites import ALL, ONE, SUITES, TIERS, Asked, run


def _help() -> str:
    said = ", ".join(suite.what for suite in ONE.values())
    return f"{said[0].upper()}{said[1:]}, or {ALL.what}."


@click.command()
@click.option(
    "--suite",
    type=click.Choice(list(SUITES)),
    default="layer",
    show_default=True,
    help=_help(),
)
@preset_option
@click.option("--checkpoint", metavar="DIR", help="A Hugging Face directory instead of a preset.")
@click.option("--layer", type=int, metavar="N", help="Layer of the checkpoint.")
@click.option(
    "--tier",
    type=click.Choice([*TIERS, "all"]),
    default="all",
    show_default=True,
    help="Weights to verify.",
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
    context: click.Context, suite: str, json_file: str | None, html_file: str | None, **given: Any
) -> int:
    """Check a layer against transformers and float64, many sequences or tokens, or a model."""
    if html_file:
        html.require_report_extra()
    asked = Asked(**given)
    _refuse(context, suite, asked)
    report = Report(environment(), {"suite": suite})
    verified = run(suite, asked, report)
    render.render(report, render.console())
    return finish(report, json_file, html_file, f"gdn-jax verify: {verified}")


def _refuse(context: click.Context, suite: str, asked: Asked) -> None:
    """Options that change nothing, or that exclude each other."""
    for name in SUITES[suite].no_use:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = name.replace("_", "-")
            raise click.UsageError(f"--suite {suite} has no use for --{option}")
    if not SUITES[suite].parts:
        if asked.checkpoint is None and asked.oracle_python is not None:
            said = f"--suite {suite} has no use for --oracle-python without --checkpoint"
            raise click.UsageError(said)
        return
    if (asked.checkpoint is None) != (asked.layer is None):
        raise click.UsageError("--checkpoint and --layer go together")
    if asked.checkpoint is not None and asked.preset is not None:
        raise click.UsageError("--preset and --checkpoint exclude each other")
    if asked.checkpoint is not None and asked.oracle not in (None, "live", "none"):
        raise click.UsageError("--checkpoint takes --oracle live or none")
