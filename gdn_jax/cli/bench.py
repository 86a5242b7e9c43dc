"""``gdn-jax bench``."""

import re
import signal
from collections.abc import Callable
from typing import Any

import click

from gdn_jax._core.environment import environment
from gdn_jax.bench.render import render
from gdn_jax.bench.run import BACKENDS, DEFAULT, SUITES, needs_matrix, run, workloads
from gdn_jax.cli.options import INTERRUPTED, finish, html_option, json_option, preset_option
from gdn_jax.config import PRESETS
from gdn_jax.report import html
from gdn_jax.report.progress import stages
from gdn_jax.report.record import Report
from gdn_jax.report.render import console


def _numbers(low: int, high: int, like: str) -> Callable[..., tuple[int, ...]]:
    """A callback that takes numbers such as ``like`` within these bounds, each once."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
        if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
            raise click.BadParameter(f"{value!r} is not like {like}", context, parameter)
        found = tuple(dict.fromkeys(map(int, value.split(","))))
        beyond = [n for n in found if not low <= n <= high]
        if beyond:
            raise click.BadParameter(f"{beyond[0]} is not {low} to {high}", context, parameter)
        return found

    return parse


@click.command()
@preset_option
@click.option(
    "--backend",
    type=click.Choice([*BACKENDS, "all"]),
    default="all",
    show_default=True,
    help="What to time; `all` lists what cannot run here.",
)
@click.option(
    "--suite",
    "suites",
    multiple=True,
    type=click.Choice(list(SUITES)),
    help="May be repeated; everything but `model` by default. `model` makes a whole one of the "
    "preset's shape, 17 GB at 27B, or on a CPU its first four layers and a vocabulary of 4096.",
)
@click.option(
    "--batch",
    "batches",
    metavar="1,8,64",
    default="1,2,4,8,16,32,64",
    show_default=True,
    callback=_numbers(1, 999999, "1,8,64"),
    help="Sequences stepped together.",
)
@click.option(
    "--tokens",
    metavar="4096,16384",
    default="16384,65536,4096",
    show_default=True,
    callback=_numbers(64, 131072, "4096,16384"),
    help="Tokens that suite prefill takes at once.",
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
@html_option
def bench(
    preset: str | None,
    backend: str,
    suites: tuple[str, ...],
    batches: tuple[int, ...],
    tokens: tuple[int, ...],
    repetitions: int,
    time_limit: float | None,
    json_file: str | None,
    html_file: str | None,
) -> int:
    """Time kernels, layers and whole models, each behind a check made in the same run.

    Ctrl-C and SIGTERM end it early: what was measured is shown and written, with exit status 130.
    """
    if html_file:
        html.require_report_extra()
    preset = preset or "qwen3.5-27b"
    settings: dict[str, Any] = {
        "layer": preset,
        "config": str(PRESETS[preset]),
        "backend": backend,
        "suites": ", ".join(suites or DEFAULT),
        "batches": ", ".join(map(str, batches)),
        "tokens": ", ".join(map(str, tokens)),
        "repetitions": repetitions,
        "time_limit": time_limit,
    }
    report = Report(environment(), settings)
    backends = BACKENDS if backend == "all" else (backend,)
    chosen = workloads(PRESETS[preset], suites or DEFAULT, batches, backends, tokens)
    if not chosen:
        raise click.UsageError(f"--suite {', '.join(suites)}: no row of backend {backend}")
    # `timeout` and batch systems end a command this way: what was measured is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with stages(1 + needs_matrix(chosen) + len(chosen)) as stage:
        whole = run(chosen, report, stage=stage, time_limit=time_limit, repetitions=repetitions)
    render(report, console())
    plots = None
    if html_file is not None:
        from gdn_jax.bench import roofline

        plots = roofline.PLOTS
    status = finish(report, json_file, html_file, f"gdn-jax bench: {preset}", plots)
    return status if whole else INTERRUPTED
