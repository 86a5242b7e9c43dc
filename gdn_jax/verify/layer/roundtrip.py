"""What one host round trip costs: a token's input up, its output down."""

import time

import jax
import numpy as np

from gdn_jax.report.record import Row

REPETITIONS = 200


def clock_resolution() -> float:
    """The smallest step of ``time.perf_counter`` seen in 1000 readings, in seconds."""
    readings = np.array([time.perf_counter() for _ in range(1000)])
    steps = np.diff(readings)
    return float(steps[steps > 0].min(initial=1.0))


def measure_round_trip(width: int) -> Row:
    """Time device_put and fetch of one float32 vector; each pair waits for both copies."""
    x = np.ones((1, width), np.float32)
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        np.array(jax.block_until_ready(jax.device_put(x)))
        times.append(time.perf_counter() - started)
    low, median, high = np.percentile(times, [25, 50, 75]) * 1e6
    return {
        "what": f"float32 [1, {width}] to the device and back",
        "median_us": float(median),
        "iqr_us": float(high - low),
        "repetitions": REPETITIONS,
        "clock_resolution_us": clock_resolution() * 1e6,
    }
