"""What is being worked on: a bar on a terminal, a line a stage elsewhere; on standard error."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Stage = Callable[[str], AbstractContextManager[None]]


@contextlib.contextmanager
def stages(total: int) -> Iterator[Stage]:
    """Yield ``stage(name)``, a context manager around each of ``total`` pieces of work."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)

        @contextlib.contextmanager
        def stage(name: str) -> Iterator[None]:
            started = time.perf_counter()
            bar.update(task, description=name)
            yield
            bar.advance(task)
            if not console.is_terminal:
                console.print(f"[dim]{name} ({time.perf_counter() - started:.1f} s)[/dim]")

        yield stage
