"""A bank and a pool under ``jax.shard_map``, over sequences."""

import os
import subprocess
import sys


def test_four_devices_give_what_one_gives() -> None:
    """In a process that has four devices: more devices here would be more threads for the rest."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.support.sharded_slots"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
