"""Files that appear whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside ``path`` to write, flushed and renamed over it at the end.

    When the body raises, the temporary file is removed and ``path`` stays as it was.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
