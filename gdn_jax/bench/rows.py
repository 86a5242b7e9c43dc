"""Checks that carry a time, and the rows of the table made of them."""

import dataclasses
from typing import Self

from gdn_jax.bench.peers.peer import PEERS
from gdn_jax.bench.slope import Timing
from gdn_jax.bench.workload import Workload
from gdn_jax.report.record import Check, Row

_SHOWS = "that what is timed computes the right thing", "that other inputs take the same time"
OTHERS = ("xla", *(peer.name for peer in PEERS))
"""The backends that pallas is compared with."""
COPIES = {
    "copy_gbps": "in place, by slope",
    "copy_blocking_gbps": "into another array, each call waited for",
}
"""The checks of the two copies, and how each is measured."""

MODEL = MODEL_DECODE, MODEL_PREFILL = "model_decode", "model_prefill"
"""Kernels whose rows are whole models."""
MATRIX, MATRIX_LIMIT = "matmul_tflops", 4e-3
"""The check of the matrix product, and the limit of its max_rel to float32, from rounding."""


@dataclasses.dataclass(frozen=True)
class TimedCheck(Check):
    """A check and what was measured after it; all None where the check does not hold.

    ``us`` is the median in microseconds, ``us_low`` and ``us_high`` are the extremes of
    ``repetitions`` measurements; ``share`` is the share of the copy's GB/s in the same run;
    ``host`` is :attr:`Timing.host`, ``peak_bytes`` :attr:`Prepared.memory`.
    """

    us: float | None = None
    us_low: float | None = None
    us_high: float | None = None
    repetitions: int | None = None
    bytes: int | None = None
    gbps: float | None = None
    share: float | None = None
    host: float | None = None
    peak_bytes: int | None = None

    @classmethod
    def of(
        cls,
        workload: Workload,
        value: float,
        detail: str,
        timing: Timing | None = None,
        copy_gbps: float | None = None,
        memory: int | None = None,
    ) -> Self:
        """The check of a workload; it has no time if ``timing`` is None or not above zero."""
        ok = value <= workload.limit
        head = (workload.id, ok, value, workload.limit, workload.unit)
        if not ok or timing is None:
            return cls(*head, detail, *_SHOWS)
        if timing.median <= 0:
            return cls(*head, f"{detail}; too short to be timed", *_SHOWS)
        us, low, high = (1e6 * s for s in (timing.median, timing.low, timing.high))
        gbps = workload.bytes / us / 1e3
        share = None if copy_gbps is None else gbps / copy_gbps
        said = f"{detail}; {us:.2f} µs [{low:.2f}, {high:.2f}], {gbps:.0f} GB/s"
        said += "" if share is None else f", {share:.1%} of the copy"
        said += "; the device waited for the host" if host_bound(timing.host) else ""
        measured = (us, low, high, timing.repetitions, workload.bytes, gbps, share, timing.host)
        return cls(*head, said, *_SHOWS, *measured, memory)


def host_bound(host: float | None) -> bool:
    """Whether the device waited for the host, since the host was queueing nearly all the time."""
    return host is not None and host > 0.9


def copy_check(moved: int, timing: Timing, wrong: int, id_: str = "copy_gbps") -> TimedCheck:
    """A copy's GB/s, which must exceed ``limit``; it holds only if every element is right."""
    ok = wrong == 0 and timing.median > 0
    us, low, high = (1e6 * s for s in (timing.median, timing.low, timing.high))
    gbps = moved / us / 1e3 if ok else None
    share = 1.0 if id_ == "copy_gbps" else None
    detail = f"x + 1 in float32, {moved / 2**30:g} GiB read and written {COPIES[id_]}"
    detail += f", {wrong} elements wrong"
    head = (id_, ok, gbps or 0.0, 0.0, "GB/s", detail)
    said = ("what a plain copy reaches on this device in this run", "what the memory could do")
    if not ok:
        return TimedCheck(*head, *said)
    return TimedCheck(*head, *said, us, low, high, timing.repetitions, moved, gbps, share)


def matrix_check(flops: int, timing: Timing, error: float) -> Check:
    """A large matrix product's TFLOP/s, which must exceed ``limit``."""
    right = error <= MATRIX_LIMIT
    detail = f"a square product of bfloat16, {flops:.2e} FLOP, max_rel {error:.1e}"
    said = ("what a large matrix product reaches on this device in this run", "what others would")
    ok = right and timing.median > 0
    value = flops / timing.median / 1e12 if ok else 0.0
    return Check(MATRIX, ok, value, 0.0, "TFLOP/s", detail, *said)


def row(
    workload: Workload,
    done: TimedCheck,
    blocking_gbps: float | None = None,
    matrix_tflops: float | None = None,
) -> Row:
    """The table's row of a workload; every time is None where the check does not hold.

    ``share_blocking`` is the share of ``blocking_gbps``, the copy that waits for each call;
    ``share_matrix`` that of the matrix product, where the workload is compared with it.
    """
    us = done.us
    made: Row = {"id": workload.id, "kernel": workload.kernel, "backend": workload.backend}
    made |= {"shape": workload.shape, "batch": workload.batch, "ok": done.ok, "error": done.value}
    made |= {"us": us, "us_low": done.us_low, "us_high": done.us_high}
    made |= {"us_a_layer": us and workload.layers and us / workload.layers}
    made |= {"repetitions": done.repetitions, "timing": workload.measure.__name__}
    made["host"] = done.host
    made["tokens_a_second"] = us and workload.tokens and 1e6 * workload.tokens / us
    made |= {"bytes": workload.bytes, "gbps": done.gbps, "share": done.share}
    made["share_blocking"] = done.gbps and blocking_gbps and done.gbps / blocking_gbps
    made |= {"flops": workload.flops, "gflops": us and workload.flops / us / 1e3}
    made["matrix"] = workload.matrix
    known = us and workload.matrix and matrix_tflops
    made["share_matrix"] = made["gflops"] / matrix_tflops / 1e3 if known else None
    made["peak_bytes"] = done.peak_bytes
    return made | {"flops_a_byte": workload.flops / workload.bytes, "links": workload.links}


def ratios(rows: list[Row]) -> list[Row]:
    """How many times faster pallas is than each other backend, where both were timed.

    The int4 product is also compared with "stream", which only reads the same weights: that ratio
    is at best one.
    """
    timed = {tuple(r[k] for k in ("kernel", "shape", "batch", "backend")): r for r in rows}
    found: list[Row] = []
    for (kernel, shape, batch, backend), mine in timed.items():
        if backend != "pallas":
            continue
        against = {other: timed.get((kernel, shape, batch, other)) for other in OTHERS}
        if kernel == "int4":
            against["stream"] = timed.get(("stream", shape, 1, "pallas"))
        for other, theirs in against.items():
            if theirs and mine["us"] and theirs["us"]:
                made: Row = {"id": mine["id"], "to": theirs["id"], "backend": other}
                made["us"] = mine["us"]
                found.append(made | {"us_to": theirs["us"], "ratio": theirs["us"] / mine["us"]})
    return found
