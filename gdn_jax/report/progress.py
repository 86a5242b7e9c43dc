"""Progress on standard error: a bar on a terminal, elsewhere a line for each stage."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Stage = Callable[[str], AbstractContextManager[None]]
Update = Callable[[str, int, int], None]


@contextlib.contextmanager
def stages(total: int) -> Iterator[Stage]:
    """Yield ``stage(name)``, a context manager around each of ``total`` pieces of work."""
    console = Console(stderr=True)
    with _shown(console) as shown:
        task = shown.add_task("", total=total)

        @contextlib.contextmanager
        def stage(name: str) -> Iterator[None]:
            started = time.perf_counter()
            shown.update(task, description=name)
            yield
            shown.advance(task)
            if not console.is_terminal:
                console.print(f"[dim]{name} ({time.perf_counter() - started:.1f} s)[/dim]")

        yield stage


@contextlib.contextmanager
def bar() -> Iterator[Update]:
    """Yield ``update(what, done, total)``; nothing is shown where there is no terminal."""
    with _shown(Console(stderr=True)) as shown:
        task = shown.add_task("", total=None)
        yield lambda what, done, total: shown.update(
            task, description=what, completed=done, total=total
        )


def _shown(console: Console) -> Progress:
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
