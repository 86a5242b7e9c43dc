"""How much memory of its own the process holds while it loads."""

import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_STATUS = Path("/proc/self/status")
_SECONDS = 0.01
"""Between two looks: what a tensor needs is held for longer."""


class HostPeak:
    """The most bytes of the process that no file backs, while the context lasts.

    A mapped checkpoint does not count: its pages are the system's to drop. ``bytes`` is None where
    the system does not tell, as outside of Linux.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            sizes = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", _STATUS.read_text(), re.M)
        except OSError:
            return
        if sizes:
            self.bytes = max(self.bytes or 0, 1024 * sum(map(int, sizes)))
