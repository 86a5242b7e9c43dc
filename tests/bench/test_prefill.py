"""The rows of many tokens: what is timed and beside what, and that a mistake hides its time."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax import oracle
from gdn_jax.bench import run as bench
from gdn_jax.bench import slope
from gdn_jax.bench.rows import matrix_check, row
from gdn_jax.bench.slope import Timing
from gdn_jax.bench.suites import chunk, prefill, prefill_layer
from gdn_jax.bench.suites.chunk import Case
from gdn_jax.bench.workload import Workload
from gdn_jax.cli import main
from gdn_jax.config import PRESETS
from gdn_jax.layer import steps
from gdn_jax.layer.state import GDNState
from tests.support.tools import max_rel

TINY, BIG = PRESETS["tiny"], PRESETS["qwen3.5-27b"]
T = 64
CASE = Case(TINY, T)
PACKED = Case(TINY, T, sequences=prefill.SEQUENCES)
SHAPE = f"4x16x8_t{T}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    command = ["bench", "--preset", "tiny", "--suite", "prefill", "--tokens", str(T)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slope, "SHORT", 1)
        patch.setattr(slope, "LONG", 3)
        with pytest.raises(SystemExit) as stop:
            main.main([*command, "--repetitions", "1", "--json", str(file)])
    assert stop.value.code == 0
    return json.loads(file.read_text())


@pytest.mark.slow
def test_every_row_is_green_or_says_why_it_did_not_run(found: dict[str, Any]) -> None:
    lines = {line["id"]: line for line in found["bench"]}
    kernels = {line["kernel"] for line in lines.values()}
    assert kernels == {
        "chunk",
        "chunk_f32",
        "chunk_packed",
        "prefill",
        "prefill_projections",
        "prefill_convolution",
        "prefill_rule",
    }
    assert all(line["ok"] and line["backend"] == "xla" for line in lines.values())
    for kernel, limit in (("chunk", 2e-2), ("chunk_f32", 1e-5), ("chunk_packed", 2e-2)):
        assert 0 < lines[f"bench.{kernel}_xla.{SHAPE}_b1"]["error"] <= limit
    refused = {line["id"]: line["reason"] for line in found["not_run"]}
    assert refused[f"bench.chunk_jla.{SHAPE}_b1"] == "no jla here"
    assert "no fla here" in refused[f"bench.chunk_fla.{SHAPE}_b1"]
    assert "no CUDA GPU" in refused[f"bench.chunk_pallas.{SHAPE}_b1"]
    assert f"bench.prefill_pallas.d64_t{T}_b1" in refused


@pytest.mark.slow
def test_rows_stand_beside_the_matrix_product_and_have_their_memory(found: dict[str, Any]) -> None:
    (product,) = (check for check in found["checks"] if check["id"] == "matmul_tflops")
    assert product["ok"]
    for line in found["bench"]:
        share = line["us"] and line["flops"] / line["us"] / 1e6 / product["value"]
        assert line["share_matrix"] == (share and pytest.approx(share))
        assert (line["peak_bytes"] is None) is (line["us"] is None)
    # v and o of 64 tokens and two states at the least; a busy machine may not have timed it.
    (chunk,) = (line for line in found["bench"] if line["kernel"] == "chunk")
    if chunk["us"] is not None:
        assert chunk["peak_bytes"] > 2 * 2 * T * TINY.value_dim + 2 * 4 * 4 * 16 * 8


def test_the_most_important_rows_come_first() -> None:
    ids = [s.id for s in prefill.workloads(BIG, prefill.TOKENS, ("xla", "pallas"))]
    short = [
        id_.removeprefix("bench.").removesuffix("_b1").replace("48x128x128_", "") for id_ in ids
    ]
    order = [f"chunk_{name}.t{n}" for name in ("pallas", "jla", "fla") for n in prefill.TOKENS]
    layer = [f"prefill{part}_pallas.d5120_t8192" for part in LAYER_PARTS]
    wide = ["chunk_f32_pallas.t16384", "chunk_f32_pallas.t4096", "chunk_packed_pallas.t16384"]
    assert short == [*order, *layer, *wide, "chunk_xla.t4096", "chunk_f32_xla.t4096"]


LAYER_PARTS = ("", "_projections", "_convolution", "_rule")


def test_flops_and_bytes_are_those_of_the_form() -> None:
    one = 2 * 2 * (2 * 64 * 64 * 16)
    one += 4 * (64**3 / 3 + 2 * (2 * 64 * 64 * 8) + 3 * (2 * 64 * 16 * 8))
    assert chunk.flops_of(TINY, 64 * 3) == int(3 * one)
    tokens = 2 * T * (2 * 2 * 16 + 2 * 4 * 8) + 2 * 4 * T * 4
    assert chunk.bytes_of(CASE) == tokens + 2 * 4 * 4 * 16 * 8
    assert chunk.bytes_of(PACKED) == tokens + 2 * 4 * 8 * 4 * 16 * 8
    whole, projections, convolution, rule = prefill_layer.workloads(TINY, T, "xla")
    weights = 64 * (96 + 32 + 4 + 4 + 32)
    assert projections.flops == 2 * T * weights
    assert projections.flops + convolution.flops + rule.flops == whole.flops


@pytest.mark.parametrize("case", [CASE, PACKED], ids=["one", "packed"])
def test_the_reference_is_the_oracle_s_on_every_token(case: Case) -> None:
    o, S = chunk.exact(case)
    *tokens, states = (np.asarray(x) for x in chunk.made(case))
    for i, (begin, end) in enumerate(zip(chunk.starts(case), chunk.starts(case)[1:], strict=False)):
        cut = (x[:, begin:end] for x in tokens)
        wanted = oracle.recurrent_gated_delta_rule(*cut, initial_state=states[i : i + 1])
        assert max_rel(o[:, begin:end], wanted[0]) < 1e-7
        assert max_rel(S[i : i + 1], wanted[1]) < 1e-7
    assert chunk.error(case, o, S) == 0


def test_no_token_and_no_state_may_be_wrong() -> None:
    o, S = chunk.exact(CASE)
    for value in (0.1, np.nan):
        assert not chunk.error(CASE, o.at[0, -1, -1, -1].add(value), S) <= chunk.LIMIT
        assert not chunk.error(CASE, o, S.at[0, 0, -1, -1].add(value)) <= chunk.LIMIT
    # A small output is compared with its own neighbours, not with large ones elsewhere.
    scale = jnp.ones((128, 1, 1)).at[64:].set(1e-4)
    small = scale * jnp.ones((128, 2, 3))
    assert float(chunk.worst_block(small.at[70, 1, 2].mul(1.5), small)) == pytest.approx(0.5)


def test_a_reference_that_numpy_does_not_have_leaves_no_row_green(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(TINY, 65)
    right = oracle.recurrent_gated_delta_rule

    def other(*operands: Any, **options: Any) -> Any:
        o, S = right(*operands, **options)
        return 1.001 * o, S

    monkeypatch.setattr(oracle, "recurrent_gated_delta_rule", other)
    *tokens, S = chunk.made(case)
    with jax.enable_x64(True):
        o, S = chunk._token_by_token(tokens, S)
    found = chunk.error(case, o, S)
    chunk.exact.cache_clear()
    assert np.isnan(found)


def test_calls_of_a_program_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "on_gpu", lambda: True)
    assert [chunk.rounds(Case(BIG, n)) for n in (64, 1024, 4096, 65536)] == [16, 4, 1, 1]

    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any) -> Any:
        return jnp.einsum("bthk,bshk->btsh", q, k), S + jnp.sum(v * v)

    *operands, S = (x.astype(jnp.float32) for x in chunk.made(CASE))
    for count in (1, 3):
        run = jax.jit(lambda x, S, n=count: chunk._chain(x, S, rule, n))
        text = run.lower(operands, S).compile().as_text()
        assert text is not None
        assert text.count(" dot(") == count, text


def assert_red(workload: Workload) -> None:
    done = bench.check_and_time(workload, 10.0, 1)
    assert done.detail.endswith("not timed"), "an error is not what is looked for"
    line = row(workload, done, None, 100.0)
    assert line["ok"] is False
    assert line["us"] is line["share_matrix"] is line["peak_bytes"] is None


def stale_state(*operands: Any, **options: Any) -> Any:
    *tokens, S = operands if len(operands) == 6 else (*operands, options["initial_state"])
    return tokens[2], S


@pytest.mark.slow
def test_a_wrong_rule_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "chunk_gated_delta_rule", stale_state)
    assert_red(chunk.workload(CASE, "xla"))
    assert_red(chunk.workload(PACKED, "xla"))


def wrong_convolution(*operands: Any) -> Any:
    out, hist = convolve(*operands)
    return out.at[0, -1, 0].add(1e-3), hist


def wrong_history(*operands: Any) -> Any:
    out, hist = convolve(*operands)
    return out, hist[:, ::-1]


def wrong_product(*operands: Any) -> Any:
    return product(*operands).at[0, 0, 0].add(1.0)


convolve, product = steps.causal_conv_tokens, prefill_layer.project


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong", "index"),
    [
        ("causal_conv_tokens", wrong_convolution, 2),
        ("causal_conv_tokens", wrong_history, 2),
        ("project", wrong_product, 1),
    ],
)
def test_a_wrong_part_of_a_layer_is_red(
    name: str, wrong: Callable[..., Any], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_layer, name, wrong)
    assert_red([*prefill_layer.workloads(TINY, T, "xla")][index])


def test_a_layer_is_held_to_its_reference_and_that_to_float64() -> None:
    _, _, state, xs = prefill_layer._start(TINY, 4, "xla")
    weights = prefill_layer._weights(TINY, "q4")
    first = {"S": np.asarray(state.S[0]), "conv_hist": np.asarray(state.conv_hist[0])}
    exact = oracle.layer_trace(weights, TINY, np.asarray(xs[0]), **first)
    y, S, hist = (
        jnp.asarray(x, jnp.float32)[None] for x in (exact["OUT"], exact["S"][-1], exact["HIST"][-1])
    )
    right = (y, GDNState(S, hist))

    def error(found: Any, wanted: Any = right) -> float:
        return prefill_layer.layer_error(TINY, xs, state, found, wanted)

    assert error(right) == 0
    off = [(y.at[0, -1, -1].add(1), right[1]), (y, GDNState(S.at[0, 0, 0, 0].add(1), hist))]
    off.append((y, GDNState(S, hist.at[0, -1, -1].add(1))))
    assert all(error(wrong) > prefill_layer.LAYER_LIMIT for wrong in off)
    assert error(off[0], off[0]) == np.inf


def test_parts_are_shares_of_their_own_layer() -> None:
    def line(kernel: str, us: float | None, shape: str = "d64_t64") -> dict[str, Any]:
        return {"kernel": kernel, "shape": shape, "backend": "pallas", "us": us}

    rows = [line("prefill", 10.0), line("prefill_projections", 6.0), line("prefill_rule", 2.5)]
    rows += [line("prefill_convolution", 1.0), line("prefill_rule", 9.0, "d64_t128")]
    (parts,) = prefill.parts(rows)
    shares = {name: parts[name] for name in ("projections", "convolution", "rule", "rest")}
    wanted = {"projections": 0.6, "convolution": 0.1, "rule": 0.25, "rest": 0.05}
    assert shares == pytest.approx(wanted)
    (parts,) = prefill.parts([*rows[:3], line("prefill_convolution", None)])
    assert parts["convolution"] is parts["rest"] is None
    assert prefill.parts([line("prefill", None)]) == []


def test_a_matrix_product_that_is_wrong_is_no_ceiling() -> None:
    timing = Timing(1e-3, 1e-3, 1e-3, 1)
    assert matrix_check(10**12, timing, 2e-3).value == pytest.approx(1000)
    for error in (1e-2, float("nan")):
        assert not matrix_check(10**12, timing, error).ok
