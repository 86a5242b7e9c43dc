"""The bench command: what may be timed and what is written."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax import oracle
from gdn_jax.bench import run as bench
from gdn_jax.bench.rows import TimedCheck, copy_check, ratios, row
from gdn_jax.bench.slope import Timing
from gdn_jax.bench.suites import delta_rule, layer, products, roundtrip
from gdn_jax.bench.workload import Prepared, Workload
from gdn_jax.cli import main
from gdn_jax.config import PRESETS
from gdn_jax.errors import BackendUnavailableError
from gdn_jax.quant.q4array import dequantize
from gdn_jax.report.progress import stages
from gdn_jax.report.record import Report

TINY = PRESETS["tiny"]
TIMES = ("us", "us_low", "us_high", "gbps", "share", "us_a_layer", "gflops", "repetitions")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main.main(["bench", "--preset", "tiny", "--repetitions", "1", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def made(error: float, measured: Callable[[int], Timing] | None = None) -> Prepared:
    timing = measured or (lambda count: Timing(2e-6, 1e-6, 4e-6, count))
    return Prepared(lambda: error, lambda carry: carry, None, "by hand", timing)


def workload(make: Callable[[], Prepared], batch: int = 1, **changes: Any) -> Workload:
    plain = Workload("k", "pallas", "4x8", batch, 6000, 12000, 2, make)
    return dataclasses.replace(plain, **changes)


def report_of(*workloads: Workload, **options: Any) -> Report:
    report = Report({}, {})
    with stages(1) as stage:
        bench.run(workloads, report, stage=stage, repetitions=1, **options)
    return report


def test_a_green_row_has_the_figures_of_its_time() -> None:
    one = workload(lambda: made(1e-7), layers=4)
    done = bench.check_and_time(one, 12.0, 7)
    found = row(one, done)
    assert found["id"] == "bench.k_pallas.4x8_b1"
    assert found["us"] == pytest.approx(2.0)
    assert (found["us_low"], found["us_high"]) == pytest.approx((1.0, 4.0))
    assert found["gbps"] == pytest.approx(3.0)
    assert found["share"] == pytest.approx(0.25)
    assert found["gflops"] == pytest.approx(6.0)
    assert found["flops_a_byte"] == 2.0
    assert found["us_a_layer"] == pytest.approx(0.5)
    assert "25.0% of the copy" in done.detail


@pytest.mark.parametrize("error", [6e-6, float("nan"), float("inf")])
def test_a_red_row_is_neither_timed_nor_given_a_time(error: float) -> None:
    def never(count: int) -> Timing:
        raise AssertionError("timed behind a red check")

    report = report_of(workload(lambda: made(error, never)))
    (found,) = report.tables["bench"]
    assert not report.ok
    assert found["ok"] is False
    assert all(found[name] is None for name in TIMES)
    assert report.checks[2].ok is False
    assert all(getattr(report.checks[2], name, None) is None for name in TIMES)


def test_a_row_that_breaks_is_red_and_the_rest_goes_on() -> None:
    def breaks() -> Prepared:
        raise RuntimeError("out of memory\nmore")

    report = report_of(workload(breaks), workload(lambda: made(0.0), batch=2))
    assert [check.ok for check in report.checks] == [True, True, False, True]
    assert "RuntimeError: out of memory" in report.checks[2].detail


def test_an_interrupt_keeps_what_was_measured() -> None:
    def interrupts() -> Prepared:
        raise KeyboardInterrupt

    batches = zip((lambda: made(0.0), interrupts, lambda: made(0.0)), (1, 2, 4), strict=True)
    report = report_of(*(workload(make, batch=B) for make, B in batches))
    assert [row["batch"] for row in report.tables["bench"]] == [1]
    left = {line["id"]: line["reason"] for line in report.tables["not_run"]}
    assert left == {f"bench.k_pallas.4x8_b{B}": "interrupted" for B in (2, 4)}


def test_what_cannot_run_is_listed_and_all_of_it_is_an_error() -> None:
    def refuses() -> Prepared:
        raise BackendUnavailableError("no such card")

    report = report_of(workload(refuses), workload(lambda: made(0.0), batch=2))
    assert report.tables["not_run"] == [{"id": "bench.k_pallas.4x8_b1", "reason": "no such card"}]
    assert report.ok
    with pytest.raises(BackendUnavailableError, match="no such card"):
        report_of(workload(refuses))


def test_rows_that_no_longer_fit_are_listed() -> None:
    now = iter(range(0, 1000, 10))
    rows = [workload(lambda: made(0.0), batch=batch) for batch in (1, 2, 4)]
    report = report_of(*rows, time_limit=55, clock=lambda: float(next(now)))
    assert [r["batch"] for r in report.tables["bench"]] == [1, 2]
    (left,) = report.tables["not_run"]
    assert left == {"id": "bench.k_pallas.4x8_b4", "reason": "no time left of 55 s"}


def test_a_row_that_works_for_others_does_not_end_the_run() -> None:
    now = iter([0, 0, 1, 1, 61, 61, 62, 62, 63])
    rows = [workload(lambda: made(0.0), batch=batch) for batch in (1, 2, 4)]
    report = report_of(*rows, time_limit=90, clock=lambda: float(next(now)))
    assert [r["batch"] for r in report.tables["bench"]] == [1, 2, 4]


def test_ratios_need_both_times() -> None:
    ours, theirs = (workload(lambda: made(0.0), backend=b) for b in ("pallas", "xla"))
    fast, slow = Timing(1e-6, 1e-6, 1e-6, 1), Timing(3e-6, 3e-6, 3e-6, 1)
    green = row(ours, TimedCheck.of(ours, 0.0, "", fast))
    other = row(theirs, TimedCheck.of(theirs, 0.0, "", slow))
    (found,) = ratios([other, green])
    assert found["ratio"] == pytest.approx(3.0)
    assert (found["id"], found["to"]) == (ours.id, theirs.id)
    red = row(theirs, TimedCheck.of(theirs, 1.0, "", slow))
    assert red["us"] is None
    assert ratios([red, green]) == []


def test_a_copy_with_a_wrong_element_is_red() -> None:
    timing = Timing(1e-3, 1e-3, 1e-3, 1)
    assert copy_check(1 << 30, timing, 0).value == pytest.approx((1 << 30) / 1e6)
    red = copy_check(1 << 30, timing, 1)
    assert not red.ok
    assert red.gbps is None
    assert copy_check(1 << 30, timing, 0, "copy_blocking_gbps").id == "copy_blocking_gbps"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    # Many tokens, and models, have modules of tests to themselves.
    few = [name for name in bench.SUITES if name not in ("prefill", "model")]
    suites = [part for name in few for part in ("--suite", name)]
    assert run(*suites, "--batch", "9", "--json", str(file)) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
def test_json_has_every_suite_in_both_tables(found: dict[str, Any]) -> None:
    assert found["ok"] is True
    copies = found["checks"][:2]
    assert [check["id"] for check in copies] == ["copy_gbps", "copy_blocking_gbps"]
    assert copies[1]["bytes"] == 2 * copies[0]["bytes"]
    for check, key in zip(copies, ("share", "share_blocking"), strict=True):
        # What is this small may end within the clock's noise, which leaves no time to divide by.
        for line in (line for line in found["bench"] if line["gbps"] and check["value"]):
            assert line[key] == pytest.approx(line["gbps"] / check["value"])
    kernels = {"int4", "float32", "bfloat16", "delta", "roundtrip_device", "roundtrip_host"}
    kernels |= {f"layer_{tier}" for tier in ("f32", "bf16", "q4")}
    kernels |= {f"stack_{tier}{sync}" for tier in ("bf16", "q4") for sync in ("", "_sync")}
    kernels |= {"slots_step_q4", "draft_snapshot", "draft_replay"}
    kernels |= {"commit_snapshot", "commit_replay", "fork"}
    assert {line["kernel"] for line in found["bench"]} == kernels
    assert [line["id"] for line in found["bench"]] == [c["id"] for c in found["checks"][2:]]
    refused = {line["id"] for line in found["not_run"]}
    assert {"bench.int4_pallas.128x64_b9", "bench.stream_pallas.128x64_b1"} <= refused
    assert "bench.middle_pallas.4x16x8_b9" in refused
    assert "bench.delta_fla.4x16x8_b9" in refused
    assert {
        "bench.slots_step_q4_pallas.d64_n18_b9",
        "bench.draft_replay_pallas.d64_t4_b9",
    } <= refused
    assert not refused & {line["id"] for line in found["bench"]}


@pytest.mark.slow
def test_json_row_is_whole(found: dict[str, Any]) -> None:
    lines = {line["id"]: line for line in found["bench"]}
    line = lines["bench.int4_xla.128x64_b9"]
    assert line["bytes"] == 128 * 64 * 9 // 16 + 4 * 9 * (128 + 64)
    assert line["flops"] == 2 * 9 * 128 * 64
    assert 0 < line["error"] < 5e-6
    assert lines["bench.roundtrip_host_xla.t32_b9"]["error"] == 0
    sync = lines["bench.stack_q4_sync_xla.2xd64_b9"]
    assert (sync["timing"], sync["repetitions"]) == ("blocking", 4)
    for id_, tokens in (("slots_step_q4_xla.d64_n64", 9), ("draft_replay_xla.d64_t4", 36)):
        many = lines[f"bench.{id_}_b9"]
        assert many["tokens_a_second"] == (many["us"] and 1e6 * tokens / many["us"])
    assert "bench.slots_step_q4_xla.d64_n18_t16_b9" in lines
    check = next(c for c in found["checks"] if c["id"] == line["id"])
    assert {"ok", "value", "limit", "unit", "detail", "us", "gbps", "share"} <= set(check)


def wrong_product(x: jnp.ndarray, w: Any, **_: Any) -> jnp.ndarray:
    return (x @ dequantize(w).T).at[-1, -1].mul(1.001)


def wrong_step(params: Any, state: Any, x: Any, cfg: Any, backend: Any) -> tuple[Any, Any]:
    y, new = layer.decode_step(params, state, x, cfg)
    return y, dataclasses.replace(new, conv_hist=state.conv_hist)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "wrong", "suite"),
    [
        (products, "q4_matmul", wrong_product, "int4"),
        (layer, "_step", wrong_step, "layer"),
    ],
)
def test_a_planted_mistake_hides_its_time_and_fails(
    module: Any,
    name: str,
    wrong: Any,
    suite: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, name, wrong)
    layer._token.cache_clear()
    file = tmp_path / "bench.json"
    options = ("--backend", "xla", "--suite", suite, "--suite", "delta", "--batch", "9")
    assert run(*options, "--json", str(file)) == 1
    layer._token.cache_clear()
    data = json.loads(file.read_text())
    assert data["ok"] is False
    for line in data["bench"]:
        assert line["ok"] is (line["kernel"] == "delta"), line["id"]
        assert line["us"] is None or line["kernel"] == "delta"
    said = capsys.readouterr().out
    assert "FAIL" in said
    assert "not timed" in said


@pytest.mark.slow
def test_a_wrong_delta_rule_and_a_wrong_round_trip_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    right = delta_rule.recurrent_gated_delta_rule

    def wrong(*operands: Any, **options: Any) -> tuple[Any, Any]:
        o, S = right(*operands, **options)
        return o, S.at[-1, -1, 0, 0].add(1e-3)

    monkeypatch.setattr(delta_rule, "recurrent_gated_delta_rule", wrong)
    (one,) = delta_rule.workloads(TINY, [2], ["xla"])
    assert not bench.check_and_time(one, None, 1).ok

    decode = roundtrip.bank_decode

    def off(*arguments: Any, **options: Any) -> tuple[Any, Any]:
        ys, state = decode(*arguments, **options)
        return jnp.nextafter(ys, 9.0), state

    monkeypatch.setattr(roundtrip, "bank_decode", off)
    host, _ = roundtrip.workloads(TINY, [1], ["xla"])
    assert bench.check_and_time(host, None, 1).value == 32 * TINY.d_model


def test_int4_reference_is_the_definition() -> None:
    w = products.draw_q4(64, 96, jnp.array([0, 1], jnp.uint32))
    assert np.array_equal(products.integers(w), oracle.wide(np.asarray(dequantize(w))))


def test_bytes_of_a_27b_layer() -> None:
    _, moved, _ = layer.sizes(PRESETS["qwen3.5-27b"], "q4", 1)
    assert 72e6 < moved < 75e6
    assert delta_rule.sizes(PRESETS["qwen3.5-27b"], 1)[1] == pytest.approx(6.3e6, rel=0.02)
    assert products.shapes(PRESETS["qwen3.5-27b"]) == ((16384, 5120), (5120, 6144))
