"""The time of one queued call, without the fixed cost of starting a queue and waiting for it."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

SHORT, LONG = 2, 14
"""Numbers of calls in the two queues whose times are subtracted."""
REPETITIONS = 7


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of ``repetitions`` measurements, and their extremes.

    ``host`` is the share of a queue's time that the host took to queue all calls: near one, the
    device waited for the host, and the time is not the device's. It is None where not measured.
    """

    median: float
    low: float
    high: float
    repetitions: int
    host: float | None = None

    @classmethod
    def of(cls, seconds: list[float], per: int = 1, host: float | None = None) -> "Timing":
        """From measurements of ``per`` pieces of work each."""
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
    """``(t(LONG calls) - t(SHORT calls)) / (LONG - SHORT)``, waiting once for each queue.

    Args:
        run: queues one call; takes what the last call returned, so that it may donate it.
        carry: what the first call takes.
        per: pieces of work in a call; the result is the time of one piece.
        repetitions: how many pairs of queues are measured.
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
    """The time of a call when each is waited for before the next one starts.

    Arguments as for :func:`slope`.
    """
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
