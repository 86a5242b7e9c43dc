"""What commands share: options, and the end of a run that checks something."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gdn_jax.config import PRESETS
from gdn_jax.report import html
from gdn_jax.report.record import Report

INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM."""


def writable(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a result file that cannot be written before any work is done."""
    if value is not None:
        parent = Path(value).absolute().parent
        if not parent.is_dir():
            raise click.BadParameter(f"no directory {parent}", param=parameter)
        if Path(value).is_dir():
            raise click.BadParameter(f"{value} is a directory; needed a file", param=parameter)
    return value


json_option = click.option(
    "--json", "json_file", metavar="FILE", callback=writable, help="Write the whole result here."
)
preset_option = click.option(
    "--preset", type=click.Choice(list(PRESETS)), help="Shape of the layer.", show_default=True
)
html_option = click.option(
    "--html", "html_file", metavar="FILE", callback=writable, help="Write a report page."
)
python_option = click.option(
    "--oracle-python",
    metavar="PYTHON",
    help="Interpreter that has torch and transformers, where this one has not.",
)
tokens_option = click.option(
    "--tokens", type=click.IntRange(min=1), default=5, show_default=True, help="Tokens to run."
)


def finish(
    report: Report,
    json_file: str | None,
    html_file: str | None,
    title: str,
    plots: Sequence[Any] | None = None,
) -> int:
    """Write the files that were asked for; the exit status."""
    if json_file:
        report.write_json(json_file)
    if html_file:
        html.write_html(html_file, report.as_dict(), title, plots)
    return 0 if report.ok else 1
