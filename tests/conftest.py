"""The CPU, strict promotion for every test, and the hypothesis profile.

Which two programs agree bit for bit depends on the device: the suite asserts what XLA does on the
CPU, and ``gdn-jax verify`` checks whatever device it runs on.
"""

import os

import jax
import pytest
from hypothesis import HealthCheck, settings

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


def pytest_configure(config: pytest.Config) -> None:
    """What XLA compiles is shared by the processes of a run, and with the next run."""
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
