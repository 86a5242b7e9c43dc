"""What is shown on standard error, where that is a terminal, while a person waits for a model."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import click
from rich.console import Console

from gdn_jax.models.loading.load import load_params
from gdn_jax.models.model import Model, load
from gdn_jax.report.progress import bar


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """Show ``what`` until the function that is yielded is called, or the block ends."""
    with Console(stderr=True).status(what) as shown:
        yield shown.stop


def loaded(path: str, weights: str, backend: str | None) -> Model:
    """:func:`gdn_jax.models.load` with a bar, and what it says of the files, on standard error."""
    log, level = logging.getLogger(load_params.__module__), logging.INFO
    notes, before = _Notes(level), log.level
    log.addHandler(notes)
    log.setLevel(level)
    try:
        with bar() as update:
            return load(path, weights=weights, backend=backend, progress=update)
    finally:
        log.removeHandler(notes)
        log.setLevel(before)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(record.getMessage(), err=True)
