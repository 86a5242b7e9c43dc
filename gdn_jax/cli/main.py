"""The command line: thin, over the functions of the package."""

import re
import sys
from pathlib import Path

import click

from gdn_jax.cli.bench import bench
from gdn_jax.cli.generate import generate, perplexity
from gdn_jax.cli.options import INTERRUPTED, json_option, python_option, tokens_option, writable
from gdn_jax.cli.verify import verify
from gdn_jax.config import PRESETS
from gdn_jax.errors import GDNError
from gdn_jax.report import render
from gdn_jax.report.progress import stages

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="gdn-jax")
def cli() -> None:
    """Gated DeltaNet inference in JAX, verified operator by operator."""


for command in (verify, bench, generate, perplexity):
    cli.add_command(command)


@cli.command()
@json_option
def info(json_file: str | None) -> int:
    """Devices, versions, presets with their sizes, and the backend of each operator."""
    from gdn_jax.cli import info as about

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
    from gdn_jax.verify.oracles import oracle_file

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
    from gdn_jax.checkpoints.gguf_writer import quantize_checkpoint
    from gdn_jax.checkpoints.hf_layer import HFCheckpoint
    from gdn_jax.cli import info as about

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
        status = _complain("interrupted", INTERRUPTED)
    except click.ClickException as error:
        status = _complain(error.format_message())
    except (GDNError, OSError) as error:
        status = _complain(str(error))
    sys.exit(status)


def _complain(message: str, status: int = 2) -> int:
    click.echo(f"gdn-jax: {' '.join(message.split())}", err=True)
    return status
