"""Time of one call of a queue, without the fixed cost of starting and of waiting for it."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

SHORT, LONG = 2, 14
"""Calls of the two queues whose difference is divided."""
REPETITIONS = 7


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of ``repetitions`` measurements, and their extremes.

    ``host`` is the share of a queue's time after which the host had queued all of it: near one, the
    device waited for the host, and the time is not the device's. None where it is not known.
    """

    median: float
    low: float
    high: float
    repetitions: int
    host: float | None = None

    @classmethod
    def of(cls, seconds: list[float], per: int = 1, host: float | None = None) -> "Timing":
        """Of measurements that each took ``per`` pieces of work."""
        seconds = [s / per for s in seconds]
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds), host)


def slope(
    run: Callable[[Any], Any],
    carry: Any,
    *,
    per: int = 1,
    repetitions: int = REPETITIONS,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """``(t(LONG calls) - t(SHORT calls)) / (LONG - SHORT)``, each queue waited for once.

    Args:
        run: queues one call; gets what the last one returned, so that it may donate it.
        carry: what the first call gets.
        per: pieces of work in a call; the result is for one.
        repetitions: pairs of queues.
        wait: returns when a carry is ready.
        clock: in seconds.
    """
    for _ in range(SHORT):
        carry = run(carry)
    wait(carry)
    seconds, shares = [], []
    for _ in range(repetitions):
        took = []
        for calls in (SHORT, LONG):
            started = clock()
            for _ in range(calls):
                carry = run(carry)
            queued = clock() - started
            wait(carry)
            took.append(clock() - started)
        seconds.append((took[1] - took[0]) / (LONG - SHORT))
        shares.append(queued / took[1] if took[1] > 0 else 0.0)
    return Timing.of(seconds, per, statistics.median(shares))


def blocking(
    run: Callable[[Any], Any],
    carry: Any,
    *,
    per: int = 1,
    repetitions: int = 4 * REPETITIONS,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Each call waited for before the next one starts: arguments as :func:`slope`."""
    for _ in range(SHORT):
        carry = run(carry)
        wait(carry)
    seconds = []
    for _ in range(repetitions):
        started = clock()
        carry = run(carry)
        wait(carry)
        seconds.append(clock() - started)
    return Timing.of(seconds, per)
