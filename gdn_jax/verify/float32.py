"""The float32 tier: one layer against transformers and float64, and the rules of its state."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax.bank import LayerBank
from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.errors import LayerNotResidentError
from gdn_jax.layer import trace_step
from gdn_jax.params import GDNParams
from gdn_jax.state import GDNState, init_state
from gdn_jax.trace import trace_shapes
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.draw import draw_inputs, draw_weights
from gdn_jax.verify.metrics import distance, unequal
from gdn_jax.verify.progress import Stage
from gdn_jax.verify.report import Check, Report, Row
from gdn_jax.verify.roundtrip import measure_round_trip
from gdn_jax.verify.rows import (
    Traces,
    decay_rows,
    operator_rows,
    operator_verdict,
    state_rows,
    token_rows,
)
from gdn_jax.verify.subject import Subject

ORACLE_LIMIT = 1e-4
FLOAT64_LIMIT = {"cpu": 3e-6, "gpu": 1e-6}
"""Above what reduction trees explain: a layer of plain dots measures 1.8e-6 at the 27B shape on a
CPU, this one 4e-7, and accelerators reduce in wider trees."""
OPERATOR_LIMIT = 1e-5
HEAD_LIMIT = 1e-3
"""A head is normalised by itself, and its ``Sᵀq`` can cancel to a hundredth of its terms: at the
27B shape head 31 is 4e-5 off at token 1, in transformers too. A wrong head is off by O(1)."""
DRIFT_LIMIT = 1e-5
DRIFT_PRESET, DRIFT_TOKENS = "tiny", 512
OURS_F64, OURS_HF, HF_F64 = "ours to float64", "ours to transformers", "transformers to float64"
STAGES = 7

_trace_step = jax.jit(trace_step, static_argnames=("cfg", "backend"))


@functools.partial(jax.jit, static_argnames=("layer", "backend"), donate_argnames="state")
def bank_decode(
    bank: LayerBank, state: GDNState, xs: jax.Array, layer: int, backend: str | None
) -> tuple[jax.Array, GDNState]:
    """:meth:`LayerBank.decode`, jitted, with the state updated in place."""
    return bank.decode(state, layer, xs, backend=backend)


def device_params(weights: Mapping[str, np.ndarray]) -> GDNParams:
    """GDNParams on the default device from host arrays by name."""
    return GDNParams(**{name: jnp.asarray(x) for name, x in weights.items()})


def run_traces(params: GDNParams, cfg: GDNConfig, xs: np.ndarray, backend: str | None) -> Traces:
    """Every operator of every token of one sequence: arrays [T, ..] by read-back name."""
    state = init_state(cfg)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in trace_shapes(cfg)}
    for x in xs:
        _, state, trace = _trace_step(params, state, jnp.asarray(x[None]), cfg=cfg, backend=backend)
        for name, values in rows.items():
            values.append(np.asarray(trace[name])[0])
    return {name: np.stack(values) for name, values in rows.items()}


@dataclasses.dataclass(frozen=True)
class Run:
    """One float32 layer's device run and its traces, which the bit checks compare with."""

    bank: LayerBank
    tokens: jax.Array
    ys: np.ndarray
    traces: Traces
    backend: str | None

    def difference(self, ys: np.ndarray, state: GDNState, layer: int) -> int:
        """Elements of an output and of a layer's state that differ from this run's in any bit."""
        count = unequal(ys, self.ys)
        count += unequal(np.asarray(state.S[layer, 0]), self.traces["S"][-1])
        return count + unequal(np.asarray(state.conv_hist[layer, 0]), self.traces["HIST"][-1])


def run(
    subject: Subject, report: Report, *, layers: int, backend: str | None, stage: Stage
) -> None:
    """Run every check of the tier and add it, with its tables, to the report."""
    cfg, xs = subject.cfg, subject.xs
    with stage("weights to the device"):
        params = device_params(subject.weights)
        bank = LayerBank(cfg, layers).preload(0, params).preload(layers - 1, params)
        state = bank.init_state()
        report.tables["state"] = state_rows(state)
    with stage("float64 oracle"):
        exact = oracle.layer_trace(subject.weights, cfg, xs)
    with stage("layer, every operator read back"):
        traces = run_traces(params, cfg, xs, backend)
    with stage("layer, one device run in two places of the stack"):
        tokens = jnp.asarray(xs[None])
        ys, state = bank_decode(bank, state, tokens, 0, backend)
        far, state = bank_decode(bank, state, tokens, layers - 1, backend)
    this = Run(bank, tokens, np.asarray(ys[0]), traces, backend)
    _compare(report, subject, this, exact)
    report.checks.append(_readback(this, state))
    report.checks.append(_cross_layer(this, np.asarray(far[0]), state))
    with stage("reset and replay"):
        report.checks.append(_reset_replay(this, state))
    with stage("host round trips"):
        report.tables["round_trip"] = [trip := measure_round_trip(cfg.d_model)]
        report.checks.append(_host_vs_device(this, trip))
        report.checks.append(_residency(this, params))
    with stage(f"drift over {DRIFT_TOKENS} tokens"):
        _drift(report, backend)


def _compare(report: Report, subject: Subject, this: Run, exact: Traces) -> None:
    limit = FLOAT64_LIMIT["cpu" if jax.default_backend() == "cpu" else "gpu"]
    tokens = report.tables.setdefault("tokens", [])
    operators = report.tables.setdefault("operators", [])
    hf = {} if subject.oracle is None else subject.oracle.trace
    shared = min(len(this.ys), len(hf.get("OUT", ())))
    if shared:
        near = token_rows(OURS_HF, this.ys[:shared], hf["OUT"][:shared], ORACLE_LIMIT)
        worst = max(row["max_rel"] for row in near)
        report.checks.append(check("f32.oracle", worst, ORACLE_LIMIT, f"OUT of {shared} tokens"))
        tokens += near
        operators += operator_rows(OURS_HF, this.traces, hf, shared)
    near = token_rows(OURS_F64, this.ys, exact["OUT"], limit)
    mine = operator_rows(OURS_F64, this.traces, exact, len(this.ys))
    tokens += near
    operators += mine
    worst = max(row["max_rel"] for row in near)
    report.checks.append(check("f32.float64", worst, limit, f"OUT of {len(near)} tokens"))
    value, detail = operator_verdict(mine, "max_rel", OPERATOR_LIMIT)
    report.checks.append(check("f32.operators", value, OPERATOR_LIMIT, detail))
    value, detail = operator_verdict(mine, "worst_head_rel", HEAD_LIMIT)
    report.checks.append(check("f32.heads", value, HEAD_LIMIT, detail))
    if shared:
        tokens += token_rows(HF_F64, hf["OUT"][:shared], exact["OUT"][:shared], None)
        operators += operator_rows(HF_F64, hf, exact, shared)


def _readback(this: Run, state: GDNState) -> Check:
    count = this.difference(this.traces["OUT"], state, 0)
    return check("f32.readback", count, 0, f"{this.ys.size} outputs and the final state")


def _cross_layer(this: Run, far: np.ndarray, state: GDNState) -> Check:
    layers = this.bank.num_layers
    between = sum(int(jnp.count_nonzero(part[1:-1])) for part in (state.S, state.conv_hist))
    count = this.difference(far, state, layers - 1) + between
    detail = (
        f"layers 0 and {layers - 1} of one stack: {this.ys.size} outputs and both states; "
        f"layers between them: {layers - 2}, all still zero"
    )
    return check("f32.cross_layer", count, 0, detail)


def _reset_replay(this: Run, state: GDNState) -> Check:
    poisoned = jax.tree.map(lambda x: x.at[0, :, ..., 0].set(jnp.nan), state)
    clean = this.bank.reset(poisoned, 0)
    again, state = bank_decode(this.bank, clean, this.tokens, 0, this.backend)
    count = this.difference(np.asarray(again[0]), state, 0)
    detail = f"layer 0 used, poisoned with NaN and reset; all {len(this.ys)} tokens run again"
    return check("f32.reset_replay", count, 0, detail)


def _host_vs_device(this: Run, trip: Row) -> Check:
    host, state = this.bank.decode_host(
        this.bank.init_state(), 0, np.asarray(this.tokens), backend=this.backend
    )
    detail = (
        f"{len(this.ys)} host round trips against one device run; a round trip of one token costs "
        f"{trip['median_us']:.1f} µs (interquartile range {trip['iqr_us']:.1f}, "
        f"{trip['repetitions']} repetitions, clock resolution {trip['clock_resolution_us']:.3f})"
    )
    return check("f32.host_vs_device", this.difference(host[0], state, 0), 0, detail)


def _residency(this: Run, params: GDNParams) -> Check:
    bank = LayerBank(this.bank.cfg, 2).preload(0, params)
    state = bank.init_state()
    before = jax.tree.map(np.array, state)
    attempts = {
        "step": lambda: bank.step(state, 1, this.tokens[:, 0]),
        "decode": lambda: bank.decode(state, 1, this.tokens),
        "decode_host": lambda: bank.decode_host(state, 1, np.asarray(this.tokens)),
    }
    count = 0
    for attempt in attempts.values():
        try:
            attempt()
        except LayerNotResidentError:
            continue
        count += 1
    count += unequal(before.S, np.asarray(state.S))
    count += unequal(before.conv_hist, np.asarray(state.conv_hist))
    return check("f32.residency", count, 0, f"{', '.join(attempts)} of a layer not resident")


def _drift(report: Report, backend: str | None) -> None:
    cfg = PRESETS[DRIFT_PRESET]
    weights, xs = draw_weights(cfg, 0), draw_inputs(cfg, DRIFT_TOKENS, 0)
    ours = run_traces(device_params(weights), cfg, xs, backend)
    exact = oracle.layer_trace(weights, cfg, xs)
    rows: list[Row] = []
    for token in range(DRIFT_TOKENS):
        out = distance(ours["OUT"][token], exact["OUT"][token])
        S = distance(ours["S"][token], exact["S"][token])
        row: Row = {"token": token, "max_rel": out.max_rel, "rms_rel": out.rms_rel}
        rows.append(row | {"S_rms_rel": S.rms_rel})
    report.tables |= {"drift": rows, "decay": decay_rows(exact)}
    worst = max(rows, key=lambda row: row["max_rel"])
    detail = (
        f"preset {DRIFT_PRESET}, {DRIFT_TOKENS} tokens, worst at token {worst['token']}; "
        f"S at the end {rows[-1]['S_rms_rel']:.1e} rms_rel"
    )
    report.checks.append(check("f32.drift512", worst["max_rel"], DRIFT_LIMIT, detail))
