"""The recorded results in ``docs/results``, and the lines that say where each comes from."""

import dataclasses
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Record:
    """One file of results."""

    file: Path
    data: Row

    @property
    def device(self) -> str:
        """What it ran on, without the operating system."""
        return self.data["environment"]["device"].split(" (")[0]

    @property
    def date(self) -> str:
        """Year, month and day."""
        return self.data["environment"]["date"][:10]

    @property
    def column(self) -> str:
        """Device and backend."""
        # Null in a record of the bundled model: too small for the kernels, it chose XLA itself.
        return f"{self.device}, {self.data['settings']['backend'] or 'xla'}"

    def source(self, what: str) -> str:
        """The file, ``what`` it holds, and the versions and day of its run."""
        made = self.data["environment"]
        commit = (made["commit"] or "?")[:12]
        return (
            f"[`{self.file.name}`](results/{self.file.name}): {what}, "
            f"JAX {made['versions']['jax']}, commit {commit}, {self.date}.  "
        )


def records(kind: str, folder: Path = RESULTS) -> list[Record]:
    """Every ``kind-*.json``, oldest first, so that a later one replaces an earlier one."""
    found = [Record(file, _read(file)) for file in sorted(folder.glob(f"{kind}-*.json"))]
    red = [record.file.name for record in found if not record.data.get("ok", True)]
    assert not red, f"a result whose checks fail is not shown: {red}"
    return sorted(found, key=lambda record: record.data["environment"]["date"])


def record(name: str) -> Record:
    """The record of this file name."""
    return Record(RESULTS / name, _read(RESULTS / name))


def bench_row(record: Record, id_: str) -> Row:
    """The timed row of this id, which must be there and green."""
    (row,) = (row for row in record.data["bench"] if row["id"] == id_)
    assert row["ok"], id_
    return row


def check_value(record: Record, id_: str) -> float:
    """The value of the check of this id."""
    (check,) = (check for check in record.data["checks"] if check["id"] == id_)
    return check["value"]


def _read(file: Path) -> Row:
    return json.loads(file.read_text(encoding="utf-8"))
