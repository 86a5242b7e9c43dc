"""Every chosen workload: prepared, checked, and timed only where the check holds."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from gdn_jax.bench import ceilings
from gdn_jax.bench.peers import recurrent_rows
from gdn_jax.bench.rows import TimedCheck, copy_check, matrix_check, ratios, row
from gdn_jax.bench.slope import REPETITIONS, blocking
from gdn_jax.bench.suites import (
    delta_rule,
    layer,
    middle,
    model,
    prefill,
    products,
    roundtrip,
    slots,
)
from gdn_jax.bench.workload import Prepared, Workload
from gdn_jax.config import GDNConfig
from gdn_jax.errors import BackendUnavailableError
from gdn_jax.report.progress import Stage
from gdn_jax.report.record import Report

Maker = Callable[[GDNConfig, Sequence[int], Sequence[str]], Iterator[Workload]]


class Suite(NamedTuple):
    """A name of ``--suite``.

    ``rows`` makes its workloads from a layer's sizes, the numbers that ``over`` names, and the
    backends.
    """

    rows: Maker
    over: Literal["batches", "tokens"] = "batches"
    default: bool = True
    """Whether the suite runs when none is named."""


SUITES = {
    "int4": Suite(products.int4),
    "float": Suite(products.floats),
    "delta": Suite(delta_rule.workloads),
    "middle": Suite(middle.workloads),
    "peer": Suite(recurrent_rows.workloads),
    "layer": Suite(layer.one_layer),
    "stack": Suite(layer.stack),
    "roundtrip": Suite(roundtrip.workloads),
    "slots": Suite(slots.workloads),
    "prefill": Suite(prefill.workloads, over="tokens"),
    # Its weights are many times what the other suites hold.
    "model": Suite(model.workloads, default=False),
}
"""Every suite by its name, in the order in which they are timed."""
DEFAULT = tuple(name for name, suite in SUITES.items() if suite.default)
BACKENDS = ("xla", "pallas")


def workloads(
    cfg: GDNConfig,
    suites: Sequence[str],
    batches: Sequence[int],
    backends: Sequence[str],
    tokens: Sequence[int] = prefill.TOKENS,
) -> list[Workload]:
    """The workloads of the chosen suites, in the order of SUITES.

    Raises:
        ConfigError: suite model is chosen, and no known model has such layers.
    """
    over = {"batches": batches, "tokens": tokens}
    chosen = [suite for name, suite in SUITES.items() if name in suites]
    return [row for suite in chosen for row in suite.rows(cfg, over[suite.over], backends)]


def run(
    chosen: Sequence[Workload],
    report: Report,
    *,
    stage: Stage,
    time_limit: float | None = None,
    repetitions: int = REPETITIONS,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Add the copies' checks, each workload's check and row, and what was not run, to the report.

    A workload is not begun when less time is left than the shorter of the last two took: the longer
    one may have prepared what several need. An interrupt leaves out the rest and keeps what was
    measured.

    Returns:
        Whether it was not interrupted.

    Raises:
        BackendUnavailableError: none of the workloads can run here.
    """
    started = clock()
    took: list[float] = []
    refused: list[str] = []
    interrupted = False
    rows = report.tables.setdefault("bench", [])
    not_run = report.tables.setdefault("not_run", [])
    best, waited, matrix = _ceilings(report, stage, repetitions, needs_matrix(chosen))
    for workload in chosen:
        if interrupted:
            not_run.append({"id": workload.id, "reason": "interrupted"})
            continue
        begun = clock()
        if time_limit is not None and begun - started + min(took[-2:], default=0) > time_limit:
            not_run.append({"id": workload.id, "reason": f"no time left of {time_limit:g} s"})
            continue
        try:
            with stage(workload.id):
                done = check_and_time(workload, best, repetitions)
        except BackendUnavailableError as error:
            refused.append(str(error))
            not_run.append({"id": workload.id, "reason": refused[-1]})
            continue
        except KeyboardInterrupt:
            interrupted = True
            not_run.append({"id": workload.id, "reason": "interrupted"})
            continue
        took.append(clock() - begun)
        report.checks.append(done)
        rows.append(row(workload, done, waited, matrix))
    report.tables["ratios"] = ratios(rows)
    if shares := prefill.parts(rows):
        report.tables["prefill_parts"] = shares
    report.checks += slots.batch8(rows, best)
    if refused and len(refused) == len(chosen):
        raise BackendUnavailableError(f"bench: {refused[0]}")
    return not interrupted


def _ceilings(
    report: Report, stage: Stage, repetitions: int, product: bool
) -> tuple[float | None, float | None, float | None]:
    """The GB/s of both copies, and the TFLOP/s of a matrix product where it is asked for."""
    with stage("copy"):
        best = copy_check(*ceilings.copy(repetitions))
        waited = copy_check(*ceilings.copy_blocking(repetitions), "copy_blocking_gbps")
        report.checks += [best, waited]
    if not product:
        return best.gbps, waited.gbps, None
    with stage("matrix product"):
        report.checks.append(check := matrix_check(*ceilings.matrix(repetitions)))
    return best.gbps, waited.gbps, check.value or None


def needs_matrix(chosen: Sequence[Workload]) -> bool:
    """Whether a workload is compared with the matrix product, so that this is timed too."""
    return any(workload.matrix for workload in chosen)


def check_and_time(workload: Workload, copy_gbps: float | None, repetitions: int) -> TimedCheck:
    """The workload's check, and its time if the check holds."""
    try:
        made: Prepared = workload.make()
        value = float(made.check())
    except BackendUnavailableError:
        raise
    except Exception as error:  # one row that fails must not cost the others their results
        said = (str(error).strip().splitlines() or [""])[0][:200]
        return TimedCheck.of(workload, float("inf"), f"{type(error).__name__}: {said}")
    if not value <= workload.limit:
        return TimedCheck.of(workload, value, f"{made.detail}; not timed")
    if made.measured is not None:
        timing = made.measured(repetitions)
    else:
        count = 4 * repetitions if workload.measure is blocking else repetitions
        timing = workload.measure(made.run, made.carry, per=workload.links, repetitions=count)
    return TimedCheck.of(workload, value, made.detail, timing, copy_gbps, made.memory)
