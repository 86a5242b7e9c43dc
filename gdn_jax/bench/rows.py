"""Checks that carry a time, and the table rows made from them."""

import dataclasses
from typing import Self

from gdn_jax.bench.slope import Timing
from gdn_jax.bench.subject import Subject
from gdn_jax.verify.report import Check, Row

_SHOWS = "that what is timed computes the right thing", "that other inputs take the same time"
OTHERS = ("xla", "fla")
"""What pallas is compared with."""


@dataclasses.dataclass(frozen=True)
class TimedCheck(Check):
    """A check with what was measured behind it: None where it does not hold.

    ``us`` is the median in microseconds, ``us_low`` and ``us_high`` the extremes of
    ``repetitions`` measurements; ``share`` is of the copy's GB/s in the same run.
    """

    us: float | None = None
    us_low: float | None = None
    us_high: float | None = None
    repetitions: int | None = None
    bytes: int | None = None
    gbps: float | None = None
    share: float | None = None

    @classmethod
    def of(
        cls,
        subject: Subject,
        value: float,
        detail: str,
        timing: Timing | None = None,
        copy_gbps: float | None = None,
    ) -> Self:
        """The check of a subject; without a time when ``timing`` is None or not above zero."""
        ok = value <= subject.limit
        head = (subject.id, ok, value, subject.limit, subject.unit)
        if not ok or timing is None:
            return cls(*head, detail, *_SHOWS)
        if timing.median <= 0:
            return cls(*head, f"{detail}; too short to be timed", *_SHOWS)
        us, low, high = (1e6 * s for s in (timing.median, timing.low, timing.high))
        gbps = subject.bytes / us / 1e3
        share = None if copy_gbps is None else gbps / copy_gbps
        said = f"{detail}; {us:.2f} µs [{low:.2f}, {high:.2f}], {gbps:.0f} GB/s"
        said += "" if share is None else f", {share:.1%} of the copy"
        measured = (us, low, high, timing.repetitions, subject.bytes, gbps, share)
        return cls(*head, said, *_SHOWS, *measured)


def copy_check(moved: int, timing: Timing, wrong: int) -> TimedCheck:
    """The copy's GB/s, green when every element is right; ``limit`` is what it has to exceed."""
    ok = wrong == 0 and timing.median > 0
    us, low, high = (1e6 * s for s in (timing.median, timing.low, timing.high))
    gbps = moved / us / 1e3 if ok else None
    detail = f"x + 1 in float32, {moved / 2**30:g} GiB read and written, {wrong} elements wrong"
    head = ("copy_gbps", ok, gbps or 0.0, 0.0, "GB/s", detail)
    said = ("what a plain copy reaches on this device in this run", "what the memory could do")
    if not ok:
        return TimedCheck(*head, *said)
    return TimedCheck(*head, *said, us, low, high, timing.repetitions, moved, gbps, 1.0)


def row(subject: Subject, done: TimedCheck) -> Row:
    """The table's row of a subject; every time is None where the check does not hold."""
    us = done.us
    made: Row = {"id": subject.id, "kernel": subject.kernel, "backend": subject.backend}
    made |= {"shape": subject.shape, "batch": subject.batch, "ok": done.ok, "error": done.value}
    made |= {"us": us, "us_low": done.us_low, "us_high": done.us_high}
    made |= {"us_a_layer": us and subject.layers and us / subject.layers}
    made |= {"repetitions": done.repetitions, "timing": subject.measure.__name__}
    made |= {"bytes": subject.bytes, "gbps": done.gbps, "share": done.share}
    made |= {"flops": subject.flops, "gflops": us and subject.flops / us / 1e3}
    return made | {"flops_a_byte": subject.flops / subject.bytes, "links": subject.links}


def ratios(rows: list[Row]) -> list[Row]:
    """How many times faster pallas is than each other backend, where both were timed."""
    timed = {tuple(r[k] for k in ("kernel", "shape", "batch", "backend")): r for r in rows}
    found: list[Row] = []
    for (*what, backend), mine in timed.items():
        for other in OTHERS if backend == "pallas" else ():
            theirs = timed.get((*what, other))
            if theirs and mine["us"] and theirs["us"]:
                made: Row = {"id": mine["id"], "to": theirs["id"], "backend": other}
                made["us"] = mine["us"]
                found.append(made | {"us_to": theirs["us"], "ratio": theirs["us"] / mine["us"]})
    return found
