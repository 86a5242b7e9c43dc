"""The slope of a queue, on a clock of its own."""

import pytest

from gdn_jax.bench.rows import host_bound
from gdn_jax.bench.slope import Timing, blocking, slope


class Machine:
    """A queue whose wait costs ``fixed`` seconds and ``each`` a call, on a clock of its own."""

    def __init__(self, fixed: float, each: float, host: float = 0.0) -> None:
        self.fixed, self.each, self.now, self.queued, self.calls = fixed, each, 0.0, 0, 0
        self.host = host

    def run(self, carry: int) -> int:
        self.now += self.host
        self.queued += 1
        self.calls += 1
        return carry + 1

    def wait(self, carry: int) -> None:
        assert carry == self.calls, "the carry was not threaded"
        self.now += self.fixed + self.each * self.queued
        self.queued = 0

    def clock(self) -> float:
        return self.now


def test_slope_leaves_the_fixed_cost_out() -> None:
    machine = Machine(fixed=5e-4, each=3e-5)
    timing = slope(machine.run, 0, per=3, wait=machine.wait, clock=machine.clock)
    assert (timing.median, timing.low, timing.high) == pytest.approx((1e-5,) * 3)
    assert timing.repetitions == 7
    assert machine.calls == 2 + 7 * 16


def test_a_queue_that_the_device_waits_for_is_seen() -> None:
    quick = Machine(fixed=0.0, each=3e-5, host=1e-5)
    slow = Machine(fixed=0.0, each=1e-6, host=1e-4)
    shares = [
        slope(machine.run, 0, wait=machine.wait, clock=machine.clock).host
        for machine in (quick, slow)
    ]
    assert shares == pytest.approx([0.25, 100 / 101])
    assert [host_bound(share) for share in (*shares, None)] == [False, True, False]


def test_blocking_keeps_the_fixed_cost() -> None:
    machine = Machine(fixed=5e-4, each=3e-5)
    timing = blocking(machine.run, 0, wait=machine.wait, clock=machine.clock)
    assert timing.median == pytest.approx(5.3e-4)


def test_timing_is_median_and_extremes() -> None:
    assert Timing.of([4.0, 1.0, 2.0], per=2) == Timing(1.0, 0.5, 2.0, 3)
