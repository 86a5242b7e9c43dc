"""The log of ``pytest --margins FILE``: how near each measured distance came to its limit."""

import json
import os
from pathlib import Path

_file: list[Path] = []


def write_to(file: Path | None) -> None:
    """Append to this file from now on, or to none."""
    _file[:] = [] if file is None else [file.resolve()]


def note(found: float, limit: float, what: str = "") -> None:
    """One line of JSON for the test that runs now; processes may share the file."""
    for file in _file:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        line = {"test": test, "what": what, "found": float(found), "limit": float(limit)}
        with file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
