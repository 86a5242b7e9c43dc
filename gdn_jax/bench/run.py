"""Every chosen subject: made, checked, and timed only where the check holds."""

import time
from collections.abc import Callable, Iterator, Sequence

from gdn_jax.bench import ceilings
from gdn_jax.bench.peers import peer
from gdn_jax.bench.rows import TimedCheck, copy_check, matrix_check, ratios, row
from gdn_jax.bench.slope import REPETITIONS, blocking
from gdn_jax.bench.subject import Prepared, Subject
from gdn_jax.bench.suites import delta, layer, middle, model, prefill, products, roundtrip, slots
from gdn_jax.config import GDNConfig
from gdn_jax.errors import BackendUnavailableError
from gdn_jax.report.progress import Stage
from gdn_jax.report.record import Report

Maker = Callable[[GDNConfig, Sequence[int], Sequence[str]], Iterator[Subject]]

SUITES: dict[str, Maker] = {
    "int4": products.int4,
    "float": products.floats,
    "delta": delta.subjects,
    "middle": middle.subjects,
    "peer": peer.subjects,
    "layer": layer.one_layer,
    "stack": layer.stack,
    "roundtrip": roundtrip.subjects,
    "slots": slots.subjects,
}
BACKENDS = ("xla", "pallas")
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def subjects(
    cfg: GDNConfig,
    suites: Sequence[str],
    batches: Sequence[int],
    backends: Sequence[str],
    tokens: Sequence[int] = prefill.TOKENS,
) -> list[Subject]:
    """The rows to come, in the order of SUITES, then prefill's, which take ``tokens``, and model's.

    Raises:
        ConfigError: suite model, and no model has such layers.
    """
    chosen = [make for name, make in SUITES.items() if name in suites]
    found = [subject for make in chosen for subject in make(cfg, batches, backends)]
    if "prefill" in suites:
        found += prefill.subjects(cfg, tokens, backends)
    if "model" in suites:
        found += model.subjects(cfg, batches, backends)
    return found


def run(
    chosen: Sequence[Subject],
    report: Report,
    *,
    stage: Stage,
    time_limit: float | None = None,
    repetitions: int = REPETITIONS,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Add the copies' checks, each subject's check and row, and what was not run, to the report.

    A subject is not begun when less time is left than the shorter of the two before it took: one
    may have done what several need. An interrupt leaves out the rest and keeps what was measured.

    Returns:
        Whether it was not interrupted.

    Raises:
        BackendUnavailableError: nothing that was asked for can run here.
    """
    started = clock()
    took: list[float] = []
    refused: list[str] = []
    interrupted = False
    rows = report.tables.setdefault("bench", [])
    not_run = report.tables.setdefault("not_run", [])
    with stage("copy"):
        best = copy_check(*ceilings.copy(repetitions))
        waited = copy_check(*ceilings.copy_blocking(repetitions), "copy_blocking_gbps")
        report.checks += [best, waited]
    matrix = None
    if needs_matrix(chosen):
        with stage("matrix product"):
            report.checks.append(matrix_check(*ceilings.matrix(repetitions)))
        matrix = report.checks[-1].value or None
    for subject in chosen:
        if interrupted:
            not_run.append({"id": subject.id, "reason": "interrupted"})
            continue
        begun = clock()
        if time_limit is not None and begun - started + min(took[-2:], default=0) > time_limit:
            not_run.append({"id": subject.id, "reason": f"no time left of {time_limit:g} s"})
            continue
        try:
            with stage(subject.id):
                done = check_and_time(subject, best.gbps, repetitions)
        except BackendUnavailableError as error:
            refused.append(str(error))
            not_run.append({"id": subject.id, "reason": refused[-1]})
            continue
        except KeyboardInterrupt:
            interrupted = True
            not_run.append({"id": subject.id, "reason": "interrupted"})
            continue
        took.append(clock() - begun)
        report.checks.append(done)
        rows.append(row(subject, done, waited.gbps, matrix))
    report.tables["ratios"] = ratios(rows)
    if shares := prefill.parts(rows):
        report.tables["prefill_parts"] = shares
    report.checks += slots.batch8(rows, best.gbps)
    if refused and len(refused) == len(chosen):
        raise BackendUnavailableError(f"bench: {refused[0]}")
    return not interrupted


def needs_matrix(chosen: Sequence[Subject]) -> bool:
    """Whether the matrix product is timed too."""
    return any(subject.matrix for subject in chosen)


def check_and_time(subject: Subject, copy_gbps: float | None, repetitions: int) -> TimedCheck:
    """The subject's check, with its time where it holds."""
    try:
        made: Prepared = subject.make()
        value = float(made.check())
    except BackendUnavailableError:
        raise
    except Exception as error:  # one row that fails must not cost the others their results
        said = (str(error).strip().splitlines() or [""])[0][:200]
        return TimedCheck.of(subject, float("inf"), f"{type(error).__name__}: {said}")
    if not value <= subject.limit:
        return TimedCheck.of(subject, value, f"{made.detail}; not timed")
    if made.measured is not None:
        timing = made.measured(repetitions)
    else:
        count = 4 * repetitions if subject.measure is blocking else repetitions
        timing = subject.measure(made.run, made.carry, per=subject.links, repetitions=count)
    return TimedCheck.of(subject, value, made.detail, timing, copy_gbps, made.memory)
