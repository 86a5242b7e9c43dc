"""The CPU, strict promotion for every test, and the hypothesis profile.

Which two programs agree bit for bit depends on the device: the suite asserts what XLA does on the
CPU, and ``gdn-jax verify`` checks whatever device it runs on.
"""

import os

import jax
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
