"""The whole suite in each instruction set and with few and many threads: ``python -m tests.isa``.

What a program rounds depends on the vectors that XLA uses and on how many threads share a product.
For each setting this runs pytest with ``XLA_FLAGS=--xla_cpu_max_isa=…`` and ``NPROC=…``, from which
XLA:CPU takes the size of its thread pool, all tests fully optimised, and writes the record anew:
how many tests passed, and which distances came nearest to their limits.

An instruction set that the processor lacks is compiled as the best one below it; the record says
which. SSE4_2 has no float16, and tests that need it are skipped there; AVX has float16 but, like
SSE4_2, no fused multiply-add. What a record of this commit already holds is not run again.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gdn_jax._core.environment import environment
from gdn_jax._core.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results" / "tests-isa.json"
NEEDS = {"SSE4_2": "sse4_2", "AVX": "avx", "AVX2": "avx2", "AVX512": "avx512f"}
"""Instruction sets, narrowest first, and the flag of /proc/cpuinfo that says it is there."""

THREADS = (1, 2, 8)
NEAREST = 10
"""Distances kept in the record."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run the suite."""

    isa: str
    threads: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that runs in this setting."""
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={self.isa}".strip()
        return os.environ | {"XLA_FLAGS": flags, "NPROC": str(self.threads), "CI": "true"}


def best(isa: str, flags: set[str]) -> str:
    """What a processor with these flags runs where at most ``isa`` is allowed."""
    order = list(NEEDS)
    able = [name for name in order[: order.index(isa) + 1] if NEEDS[name] in flags]
    return able[-1] if able else "SSE"


def processor_flags() -> set[str]:
    """The flags of the first processor, empty where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def counts(junit: Path) -> dict[str, int]:
    """Tests passed, failed and skipped by a JUnit file of pytest."""
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    number = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    passed = number["tests"] - failed - number["skipped"]
    return {"passed": passed, "failed": failed, "skipped": number["skipped"]}


def failed_tests(junit: Path) -> list[str]:
    """Which tests failed, as pytest names them."""
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    return [
        f"{case.attrib['classname']}::{case.attrib['name']}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def nearest(margins: Path, count: int = NEAREST) -> list[dict[str, Any]]:
    """The distances that came nearest to a limit above zero, the nearest of each test."""
    worst: dict[str, dict[str, Any]] = {}
    for line in margins.read_text(encoding="utf-8").splitlines() if margins.exists() else ():
        row = json.loads(line)
        if row["limit"] > 0:
            share = row["found"] / row["limit"]
            name = row["test"].split("[")[0]
            if name not in worst or share > worst[name]["share"]:
                worst[name] = {"test": row["test"], "share": round(share, 4), "limit": row["limit"]}
    return sorted(worst.values(), key=lambda row: -row["share"])[:count]


def run(setting: Setting, arguments: list[str]) -> dict[str, Any]:
    """Run pytest once; its row of the record."""
    with tempfile.TemporaryDirectory() as folder:
        junit, margins = Path(folder, "junit.xml"), Path(folder, "margins.jsonl")
        command = [sys.executable, "-m", "pytest", "--optimise-all", f"--junitxml={junit}"]
        command += [f"--margins={margins}", "-o", f"cache_dir=.pytest_cache/isa-{setting.isa}"]
        begun = time.monotonic()
        done = subprocess.run([*command, *arguments], cwd=ROOT, env=setting.environment)
        seconds = round(time.monotonic() - begun)
        row: dict[str, Any] = {"isa": setting.isa, "ran_as": best(setting.isa, processor_flags())}
        row |= {"threads": setting.threads, "status": done.returncode, "seconds": seconds}
        if junit.exists():
            row |= counts(junit) | {"failures": failed_tests(junit)}
        return row | {"nearest": nearest(margins)}


def settings(isas: list[str], threads: list[int]) -> Iterator[Setting]:
    """Every instruction set with every number of threads."""
    return (Setting(isa, count) for isa in isas for count in threads)


def main() -> int:
    """Run what is asked for; 1 where a setting is not green."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--isa", nargs="+", choices=list(NEEDS), default=list(NEEDS))
    parser.add_argument("--threads", nargs="+", type=int, default=list(THREADS))
    parser.add_argument("--json", type=Path, default=RECORD, metavar="FILE")
    parser.add_argument("--again", action="store_true", help="run what the record holds too")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    asked = parser.parse_args()
    now, rows = environment(), []
    if asked.json.exists() and not asked.again:
        record = json.loads(asked.json.read_text(encoding="utf-8"))
        if record["environment"]["commit"] == now["commit"]:
            rows = record["settings"]
    known = {(row["isa"], row["threads"]) for row in rows if row["status"] == 0}
    rows = [row for row in rows if row["status"] == 0]
    for setting in settings(asked.isa, asked.threads):
        if (setting.isa, setting.threads) not in known:
            rows.append(run(setting, asked.pytest))
            record = {"environment": now, "pytest": asked.pytest, "settings": rows}
            write_atomically(asked.json, (json.dumps(record, indent=1) + "\n").encode())
    return int(any(row["status"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
