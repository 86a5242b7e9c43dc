"""How the suite runs: devices, strictness, processes, what is compiled how, and a log of margins.

Which two programs agree bit for bit depends on the device: the suite asserts what XLA does on the
CPU, and ``gdn-jax verify`` checks whatever device it runs on.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, settings

from tests.support import margins

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile(
    "gdn",
    max_examples=12,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gdn")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite; CONTRIBUTING.md says when to use them."""
    group = parser.getgroup("gdn-jax")
    group.addoption(
        "--margins",
        type=Path,
        metavar="FILE",
        help="append every measured distance and its limit to FILE, one JSON line each",
    )
    group.addoption(
        "--optimise-all",
        action="store_true",
        help="compile with all of XLA's optimisations, as users do; takes twice as long",
    )


def pytest_configure(config: pytest.Config) -> None:
    """How XLA compiles, and that what it compiled serves all processes of a run, and the next run.

    Half of the suite's time is compiling, and without LLVM's optimisations a program takes half as
    long. XLA's own passes, which fuse and order sums, are the same either way.
    """
    margins.write_to(config.getoption("--margins"))
    quickly = not config.getoption("--optimise-all")
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quickly))
    jax.config.update("jax_disable_most_optimizations", quickly)
    cache = getattr(config, "cache", None)
    if hasattr(config, "workerinput") or cache is None:
        return
    for name, value in (
        ("jax_compilation_cache_dir", str(cache.mkdir("jax"))),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: one process for each CPU that this one may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def has_float16() -> bool:
    """Whether XLA converts float16 here: on x86 it needs F16C, and says so only when it links.

    See https://github.com/openxla/xla/issues/6787.
    """
    try:
        jax.jit(lambda x: x.astype(jnp.float32))(jnp.ones(8, jnp.float16))
    except jax.errors.JaxRuntimeError as error:
        return "Failed to materialize symbols" not in str(error)
    return True


_without_float16: list[BaseException] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> Iterator[None]:
    """A test that fails for lack of float16 is skipped on a processor that cannot convert it.

    Its error may be XLA's own, one that a command made of it, or that of a fixture once more.
    """
    report: Any = yield
    error = call.excinfo and call.excinfo.value
    if error is None or not report.failed:
        return report
    said = report.longreprtext + report.capstderr
    lacking = "__extendhfsf2" in said or "__truncsfhf2" in said or "materialize symbols" in said
    if any(error is one for one in _without_float16) or (lacking and not has_float16()):
        _without_float16.append(error)
        report.outcome = "skipped"
        report.longrepr = (str(report.fspath), 0, "Skipped: XLA has no float16 on this processor")
    return report
