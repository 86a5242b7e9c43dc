"""The float32 tier: one layer against transformers and float64, and the rules of its state."""

import jax
import numpy as np

from gdn_jax import oracle
from gdn_jax.errors import LayerNotResidentError
from gdn_jax.layer.params import GDNParams
from gdn_jax.report.metrics import unequal
from gdn_jax.report.progress import Stage
from gdn_jax.report.record import Check, Report
from gdn_jax.serving.bank import LayerBank
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.draw import DRIFT_TOKENS, draw_inputs, draw_weights, drift_config
from gdn_jax.verify.layer.device_run import DeviceRun, device_params, run_traces
from gdn_jax.verify.layer.roundtrip import measure_round_trip
from gdn_jax.verify.layer.rows import (
    Traces,
    decay_rows,
    drift_rows,
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
OURS_F64, OURS_HF, HF_F64 = "ours to float64", "ours to transformers", "transformers to float64"
STAGES = 6


def run(
    subject: Subject, report: Report, *, layers: int, backend: str | None, stage: Stage
) -> None:
    """Run every check of the tier and add it, with its tables, to the report."""
    with stage("weights to the device"):
        params = device_params(subject.weights)
        bank = LayerBank(subject.cfg, layers).preload(0, params).preload(layers - 1, params)
    with stage("float64 oracle"):
        exact = oracle.layer_trace(subject.weights, subject.cfg, subject.xs)
    with stage("layer, in two places of the stack"):
        this = DeviceRun.of("f32", bank, 0, layers - 1, subject.xs, backend)
    report.tables["state"] = state_rows(this.state)
    _compare(report, subject, this, exact)
    report.checks += [this.readback(), this.cross_layer()]
    with stage("reset and replay"):
        report.checks += [this.reset_replay(), this.repeat()]
    with stage("host round trips"):
        report.tables["round_trip"] = [trip := measure_round_trip(subject.cfg.d_model)]
        report.checks += [this.host_vs_device(trip), _residency(this, params)]
    with stage(f"drift over {DRIFT_TOKENS} tokens"):
        _drift(report, backend)


def _compare(report: Report, subject: Subject, this: DeviceRun, exact: Traces) -> None:
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


def _residency(this: DeviceRun, params: GDNParams) -> Check:
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
    cfg = drift_config(backend)
    weights, xs = draw_weights(cfg, 0), draw_inputs(cfg, DRIFT_TOKENS, 0)
    ours = run_traces(device_params(weights), cfg, xs, backend)
    exact = oracle.layer_trace(weights, cfg, xs)
    rows = drift_rows(ours, exact)
    report.tables |= {"drift": rows, "decay": decay_rows(exact)}
    worst = max(rows, key=lambda row: row["max_rel"])
    detail = (
        f"K {cfg.head_k_dim}, V {cfg.head_v_dim}, {DRIFT_TOKENS} tokens, "
        f"worst at token {worst['token']}; "
        f"S at the end {rows[-1]['S_rms_rel']:.1e} rms_rel"
    )
    report.checks.append(check("f32.drift512", worst["max_rel"], DRIFT_LIMIT, detail))
