"""The command line: thin, over the functions of :mod:`gdn_jax.verify`."""

import re
import sys
from pathlib import Path
from typing import Any

import click

from gdn_jax.config import PRESETS
from gdn_jax.environment import environment
from gdn_jax.errors import GDNError
from gdn_jax.verify import html, render
from gdn_jax.verify.progress import stages
from gdn_jax.verify.report import Report

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
TIERS = ("f32", "q4", "all")
SUITES = ("int4", "float", "delta", "middle", "peer", "layer", "stack", "roundtrip")


def _writable(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a result file that cannot be written before any work is done."""
    if value is not None:
        parent = Path(value).absolute().parent
        if not parent.is_dir():
            raise click.BadParameter(f"no directory {parent}", param=parameter)
        if Path(value).is_dir():
            raise click.BadParameter(f"{value} is a directory; needed a file", param=parameter)
    return value


json_option = click.option(
    "--json", "json_file", metavar="FILE", callback=_writable, help="Write the whole result here."
)
preset_option = click.option(
    "--preset", type=click.Choice(list(PRESETS)), help="Shape of the layer.", show_default=True
)
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
    help="Layers of state; three of them are stepped.",
)
@tokens_option
@click.option("--backend", help="Insist on a backend; by default the best available one.")
@click.option(
    "--oracle",
    metavar="shipped|live|none|FILE",
    help="What transformers computed: the file that ships for the preset (the default), computed "
    "now, left out, or a file made by `gdn-jax oracle export`.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Of drawn weights and inputs.")
@python_option
@json_option
@click.option(
    "--html", "html_file", metavar="FILE", callback=_writable, help="Write a report page."
)
def verify(
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
    """Check a layer against transformers and float64, operator by operator."""
    from gdn_jax.backend import select_backend
    from gdn_jax.verify import float32, int4, subject

    if (checkpoint is None) != (layer is None):
        raise click.UsageError("--checkpoint and --layer go together")
    if html_file:
        html.require_report_extra()
    tiers = {"f32": float32, "q4": int4}
    chosen_tiers = list(tiers.values()) if tier == "all" else [tiers[tier]]
    with stages(1 + sum(module.STAGES for module in chosen_tiers)) as stage:
        with stage("weights and inputs"):
            if checkpoint is None:
                chosen = subject.from_preset(
                    preset or "qwen3.5-27b",
                    tokens,
                    oracle or "shipped",
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
        if int4 in chosen_tiers:
            int4.check_widths(chosen.cfg)
        settings: dict[str, Any] = {
            "layer": chosen.name,
            "config": str(chosen.cfg),
            "tier": tier,
            "layers": layers,
            "tokens": tokens,
            "backend": select_backend("decode", chosen.cfg, backend=backend),
            "drawn": chosen.drawn,
            "transformers": chosen.transformers,
        }
        report = Report(environment(), settings)
        for module in chosen_tiers:
            module.run(chosen, report, layers=layers, backend=backend, stage=stage)
    render.render(report, render.console())
    return _finish(report, json_file, html_file, f"gdn-jax verify: {chosen.name}")


def _batches(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """``1,8,64`` as numbers."""
    if not re.fullmatch(r"0*[1-9]\d{0,5}(,0*[1-9]\d{0,5})*", value, re.ASCII):
        raise click.BadParameter(f"{value!r} is not like 1,8,64", context, parameter)
    return tuple(dict.fromkeys(map(int, value.split(","))))


@cli.command()
@preset_option
@click.option(
    "--backend",
    type=click.Choice(["xla", "pallas", "all"]),
    default="all",
    show_default=True,
    help="What to time; `all` lists what cannot run here.",
)
@click.option(
    "--suite",
    "suites",
    multiple=True,
    type=click.Choice(SUITES),
    help="May be repeated; everything by default.",
)
@click.option(
    "--batch",
    "batches",
    metavar="1,8,64",
    default="1,2,4,8,16,32,64",
    show_default=True,
    callback=_batches,
    help="Sequences stepped together.",
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    default=7,
    show_default=True,
    help="Measurements behind each median.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Begin no row that would end later; those left are listed.",
)
@json_option
@click.option(
    "--html", "html_file", metavar="FILE", callback=_writable, help="Write a report page."
)
def bench(
    preset: str | None,
    backend: str,
    suites: tuple[str, ...],
    batches: tuple[int, ...],
    repetitions: int,
    time_limit: float | None,
    json_file: str | None,
    html_file: str | None,
) -> int:
    """Time kernels and layers, each behind a check against float64 made in the same run."""
    from gdn_jax.bench import render as tables
    from gdn_jax.bench.run import BACKENDS, run, subjects

    if html_file:
        html.require_report_extra()
    preset = preset or "qwen3.5-27b"
    settings: dict[str, Any] = {
        "layer": preset,
        "config": str(PRESETS[preset]),
        "backend": backend,
        "suites": ", ".join(suites) or "all",
        "batches": ", ".join(map(str, batches)),
        "repetitions": repetitions,
        "time_limit": time_limit,
    }
    report = Report(environment(), settings)
    backends = BACKENDS if backend == "all" else (backend,)
    chosen = subjects(PRESETS[preset], suites or SUITES, batches, backends)
    if not chosen:
        raise click.UsageError(f"--suite {', '.join(suites)}: no row of backend {backend}")
    with stages(1 + len(chosen)) as stage:
        run(chosen, report, stage=stage, time_limit=time_limit, repetitions=repetitions)
    tables.render(report, render.console())
    return _finish(report, json_file, html_file, f"gdn-jax bench: {preset}")


def _finish(report: Report, json_file: str | None, html_file: str | None, title: str) -> int:
    if json_file:
        report.write_json(json_file)
    if html_file:
        html.write_html(html_file, report.as_dict(), title)
    return 0 if report.ok else 1


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
@click.option("--out", metavar="FILE", required=True, callback=_writable)
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
@click.option("--out", metavar="FILE.gguf", required=True, callback=_writable)
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
