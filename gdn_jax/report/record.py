"""The results of a run as data. Rendering is in :mod:`render` and :mod:`html`."""

import dataclasses
import json
import math
import os
from typing import Any

from gdn_jax._core.files import write_atomically

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: its value against a limit, and what passing it shows and does not show."""

    id: str
    ok: bool
    value: float
    limit: float
    unit: str
    detail: str
    shows: str
    shows_not: str


@dataclasses.dataclass
class Report:
    """Environment, settings, checks and named tables of one run."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    checks: list[Check] = dataclasses.field(default_factory=list)
    tables: dict[str, list[Row]] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there are checks and all of them hold."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: ``ok``, ``environment``, ``settings``, ``checks``, then each table."""
        checks = [dataclasses.asdict(check) for check in self.checks]
        head = {"ok": self.ok, "environment": self.environment, "settings": self.settings}
        return finite(head | {"checks": checks} | self.tables)

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`as_dict` to a file, atomically, one line a table row."""
        entries = [f"{_json(key)}: {_lines(value)}" for key, value in self.as_dict().items()]
        write_atomically(path, ("{\n" + ",\n".join(entries) + "\n}\n").encode())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return _json(value)
    return "[\n" + ",\n".join(_json(row) for row in value) + "\n]"


def projection_total(rows: list[Row]) -> Row:
    """Sizes of all projections together, without errors: a closing row of their table."""
    full, small = (sum(row[key] for row in rows) for key in ("float32_MiB", "int4_MiB"))
    row: Row = {"projection": "together", "float32_MiB": full, "int4_MiB": small}
    return row | {"ratio": full / small}


def finite(value: Any) -> Any:
    """JSON has no infinity or NaN: they become the strings "inf", "-inf" and "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
