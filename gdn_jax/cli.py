"""The command line: thin, over the functions of :mod:`gdn_jax.verify`."""

import re
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gdn_jax.bench.command import bench
from gdn_jax.config import PRESETS
from gdn_jax.environment import environment
from gdn_jax.errors import GDNError
from gdn_jax.verify import html, render
from gdn_jax.verify.options import finish, html_option, json_option, preset_option, writable
from gdn_jax.verify.progress import stages
from gdn_jax.verify.report import Report

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
TIERS = ("f32", "q4", "all")
SUITES = ("layer", "state", "prefill", "all")
NO_USE = {
    "state": ("tier", "tokens", "oracle", "oracle_python"),
    "prefill": ("tier", "tokens"),
}
"""Options of verify that a suite has no use for."""


python_option = click.option(
    "--oracle-python",
    metavar="PYTHON",
    help="Interpreter that has torch and transformers, where this one has not.",
)
tokens_option = click.option(
    "--tokens", type=click.IntRange(min=1), default=5, show_default=True, help="Tokens to run."
)


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="gdn-jax")
def cli() -> None:
    """Gated DeltaNet inference in JAX, verified operator by operator."""


@cli.command()
@click.option(
    "--suite",
    type=click.Choice(SUITES),
    default="layer",
    show_default=True,
    help="One layer operator by operator, many sequences in the slots of a pool, many tokens at "
    "once, or all of them.",
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
    """Check a layer against transformers and float64, many sequences, or many tokens at once."""
    from gdn_jax.backend import select_backend
    from gdn_jax.verify import float32, int4, prefill, sequences, subject

    if (checkpoint is None) != (layer is None):
        raise click.UsageError("--checkpoint and --layer go together")
    if html_file:
        html.require_report_extra()
    for name in NO_USE.get(suite, ()):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = name.replace("_", "-")
            raise click.UsageError(f"--suite {suite} has no use for --{option}")
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
    with stages(1 + sum(module.STAGES for module in parts)) as stage:
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
        if suite in ("layer", "all"):
            settings |= {"tier": tier, "tokens": tokens}
        if suite != "state":
            settings["transformers"] = chosen.transformers
        report = Report(environment(), settings)
        for module in parts:
            module.run(chosen, report, layers=layers, backend=backend, stage=stage)
    render.render(report, render.console())
    return finish(report, json_file, html_file, f"gdn-jax verify: {chosen.name}")


cli.add_command(bench)


@cli.command()
@json_option
def info(json_file: str | None) -> int:
    """Devices, versions, presets with their sizes, and the backend of each operator."""
    from gdn_jax import info as about

    found = about.collect()
    about.render(found, render.console())
    if json_file:
        about.write_json(json_file, found)
    return 0


@cli.group(name="oracle")
def oracle_group() -> None:
    """Files of what the real transformers layer computes."""


@oracle_group.command()
@click.option("--preset", type=click.Choice(list(PRESETS)), required=True)
@tokens_option
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--architecture",
    type=click.Choice(["qwen3_5", "qwen3_next"]),
    help="Which transformers layer; by default the one the preset belongs to.",
)
@click.option("--out", metavar="FILE", required=True, callback=writable)
@python_option
def export(
    preset: str,
    tokens: int,
    seed: int,
    architecture: str | None,
    out: str,
    oracle_python: str | None,
) -> int:
    """Run the installed transformers layer and write its inputs and every operator's output."""
    from gdn_jax.verify import oracle_file

    oracle_file.export_oracle(
        out,
        PRESETS[preset],
        tokens=tokens,
        seed=seed,
        architecture=architecture or oracle_file.architecture_of(preset),
        python=oracle_python,
    )
    click.echo(f"{out}: {Path(out).stat().st_size / 1e6:.2f} MB")
    return 0


def _layers(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[int, ...] | None:
    """``0,1,4-6`` as numbers, ``all`` as None."""
    if value == "all":
        return None
    found: list[int] = []
    for part in value.split(","):
        first, _, last = part.partition("-")
        bounds = re.fullmatch(r"\d+(-\d+)?", part, re.ASCII) and (int(first), int(last or first))
        if not bounds or bounds[0] > bounds[1]:
            raise click.BadParameter(f"{value!r} is not like 0,1,4-6 or all", context, parameter)
        found += range(bounds[0], bounds[1] + 1)
    return tuple(found)


@cli.command()
@click.option("--checkpoint", metavar="DIR", required=True, help="A Hugging Face directory.")
@click.option(
    "--layers",
    metavar="0,1,4-6|all",
    default="all",
    show_default=True,
    callback=_layers,
    help="Linear attention layers.",
)
@click.option("--rule", type=click.Choice(["q4_0", "mse"]), default="q4_0", show_default=True)
@click.option("--out", metavar="FILE.gguf", required=True, callback=writable)
@json_option
def quantize(
    checkpoint: str,
    layers: tuple[int, ...] | None,
    rule: str,
    out: str,
    json_file: str | None,
) -> int:
    """Quantise the large projections of layers to int4 in a GGUF file.

    The file holds these linear attention layers only, not a whole model.
    """
    from gdn_jax import info as about
    from gdn_jax.checkpoint import HFCheckpoint
    from gdn_jax.gguf.writer import quantize_checkpoint

    count = len(layers or HFCheckpoint.open(checkpoint).linear_layers)
    with stages(count) as stage:
        written = quantize_checkpoint(checkpoint, layers, out, rule=rule, progress=stage)
    size = Path(out).stat().st_size
    click.echo(f"{out}: {len(written)} layers, {size / 1e6:.2f} MB")
    if json_file:
        found = {"file": out, "bytes": size, "layers": list(written), "rule": rule}
        about.write_json(json_file, found)
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Entry point: exit status 0 when all holds, 1 when a check fails, 2 for bad usage or input."""
    try:
        status = cli.main(args=arguments, prog_name="gdn-jax", standalone_mode=False)
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except click.Abort:
        status = _complain("interrupted", 130)
    except click.ClickException as error:
        status = _complain(error.format_message())
    except (GDNError, OSError) as error:
        status = _complain(str(error))
    sys.exit(status)


def _complain(message: str, status: int = 2) -> int:
    click.echo(f"gdn-jax: {' '.join(message.split())}", err=True)
    return status
