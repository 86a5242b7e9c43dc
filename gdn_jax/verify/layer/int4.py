"""The int4 tier: what the int4 path itself does, apart from what quantising costs."""

import dataclasses
from collections.abc import Mapping

import gguf
import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError
from gdn_jax.layer.params import LARGE, GDNParams, param_dims
from gdn_jax.quant.codecs import q4_to_gguf_blocks
from gdn_jax.quant.q4_matmul import q4_matmul
from gdn_jax.quant.q4_pool import Q4Pool
from gdn_jax.quant.q4array import GROUP, Q4Array
from gdn_jax.quant.quantize import RULES, quantize_q4
from gdn_jax.report.metrics import distance
from gdn_jax.report.progress import Stage
from gdn_jax.report.record import Check, Report, Row
from gdn_jax.serving.bank import LayerBank
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.draw import DRIFT_TOKENS, draw_inputs, draw_weights, drift_config
from gdn_jax.verify.layer.device_run import DeviceRun, device_params, run_traces
from gdn_jax.verify.layer.f16 import check_f16_convert
from gdn_jax.verify.layer.pool_rules import residency_check
from gdn_jax.verify.layer.roundtrip import measure_round_trip
from gdn_jax.verify.layer.rows import (
    Traces,
    drift_rows,
    operator_rows,
    operator_verdict,
    token_rows,
)
from gdn_jax.verify.subject import Subject

KERNEL_LIMIT = 5e-6
"""Two float32 sums of the same products, in other orders, through seven steps."""
GATE_FACTOR = 10.0
"""How far the worst single projection's error may grow through norms and recurrence."""
GATE_CEILING = 0.5
"""A wiring mistake is off by O(1); a gate above this would no longer see one."""
GROUP_SIZES = (16, 32, 64, 128, 256)
SAMPLE_ROWS = 512
Q4_EXACT = "int4 to float64 with the dequantised weights"
Q4_TWIN = "int4 to float32 with the dequantised weights"
Q4_F32 = "int4 to float32"
KEYS = {"in_proj_qkv": "qkv", "in_proj_z": "z", "out_proj": "out"}
STAGES = 7

Weights = Mapping[str, np.ndarray]


def dequantise_on_the_host(weights: Mapping[str, Q4Array]) -> dict[str, np.ndarray]:
    """Float32 weights through GGUF blocks and the gguf package: a decoder that is not ours."""
    kind = gguf.GGMLQuantizationType.Q4_0
    return {n: gguf.quants.dequantize(q4_to_gguf_blocks(w), kind) for n, w in weights.items()}


def check_widths(cfg: GDNConfig) -> None:
    """Raise ShapeError where int4 cannot hold a projection of this shape."""
    for name in LARGE:
        label, width = param_dims(cfg)[name][1]
        if width % GROUP:
            raise ShapeError(
                f"--tier q4: {name} has width {label}={width}; needed a multiple of {GROUP} "
                "(--tier f32 takes any)"
            )


def bound_bank(
    cfg: GDNConfig, layers: int, params: GDNParams, pool: Q4Pool, bound: tuple[int, ...]
) -> LayerBank:
    """Layer 0 in float32, the ``bound`` ones in int4 from the pool, with the same small tensors."""
    bank = LayerBank(cfg, layers).preload(0, params)
    for layer in bound:
        bank = bank.preload_small(layer, params).bind_q4(layer, pool, qkv="qkv", z="z", out="out")
    return bank


def run(
    subject: Subject, report: Report, *, layers: int, backend: str | None, stage: Stage
) -> None:
    """Run every check of the tier and add it, with its tables, to the report."""
    cfg, xs = subject.cfg, subject.xs
    with stage("quantising three projections"):
        int4 = {name: quantize_q4(subject.weights[name]) for name in LARGE}
        decoded = {**subject.weights, **dequantise_on_the_host(int4)}
        pool = Q4Pool({KEYS[name]: w for name, w in int4.items()})
    with stage("float32 and int4 layers of one stack"):
        params = device_params(subject.weights)
        bank = bound_bank(cfg, layers, params, pool, (1, layers - 1))
        plain = run_traces(params, cfg, xs, backend)
        this = DeviceRun.of("q4", bank, 1, layers - 1, xs, backend)
    with stage("the dequantised weights in float64 and float32"):
        exact = oracle.layer_trace(decoded, cfg, xs)
        twin = run_traces(device_params(decoded), cfg, xs, backend)
    report.checks.append(_f16_check())
    rows = operator_rows(Q4_EXACT, this.traces, exact, len(xs))
    rows += operator_rows(Q4_TWIN, this.traces, twin, len(xs))
    value, detail = operator_verdict(rows, "max_rel", KERNEL_LIMIT)
    report.checks.append(check("q4.kernel_vs_dequantized", value, KERNEL_LIMIT, detail))
    report.tables["q4_operators"] = operator_rows(Q4_F32, this.traces, plain, len(xs)) + rows
    report.tables["projections"] = _projection_rows(subject.weights, int4, xs, plain, backend)
    report.tables["q4_tokens"] = token_rows(Q4_F32, this.ys, plain["OUT"], None)
    report.checks.append(_gate_check(report, this.ys, plain["OUT"]))
    report.checks += [this.readback(), this.cross_layer(), this.reset_replay(), this.repeat()]
    with stage("host round trips of the int4 layer"):
        trip = measure_round_trip(cfg.d_model)
        report.checks.append(this.host_vs_device(trip))
    with stage("residency rules"):
        report.checks.append(residency_check(bank, params, int4, this.tokens))
    with stage("group sizes and rules"):
        report.tables["q4_groups"] = _group_rows(subject.weights["in_proj_qkv"][:SAMPLE_ROWS])
    with stage(f"int4 over {DRIFT_TOKENS} tokens"):
        report.tables["q4_drift"] = _drift_rows(backend)


def _f16_check() -> Check:
    found = check_f16_convert()
    detail = (
        f"65 536 patterns; besides, {found.nan_payload} NaNs have another payload and "
        f"{found.nan_sign} another sign, which hardware may choose"
    )
    return check("f16.convert", found.unequal, 0, detail)


def _projection_rows(
    weights: Weights,
    int4: Mapping[str, Q4Array],
    xs: np.ndarray,
    plain: Traces,
    backend: str | None,
) -> list[Row]:
    """Each projection alone, on the float32 layer's own inputs: what quantising it costs."""
    inputs = {"in_proj_qkv": xs, "in_proj_z": xs, "out_proj": plain["ONN"]}
    rows: list[Row] = []
    for name, w in int4.items():
        x = inputs[name].reshape(len(inputs[name]), -1)
        exact = oracle.wide(x) @ oracle.wide(weights[name]).T
        found = q4_matmul(jnp.asarray(x), w, backend=backend)
        eight = q4_matmul(jnp.asarray(x), w, activations="q8", backend="xla")
        d, q8 = distance(np.asarray(found), exact), distance(np.asarray(eight), exact)
        row: Row = {"projection": name, "max_rel": d.max_rel, "rms_rel": d.rms_rel}
        row |= {"rms_rel_q8_activations": q8.rms_rel, "float32_MiB": weights[name].nbytes / 2**20}
        row |= {"int4_MiB": w.nbytes / 2**20, "ratio": weights[name].nbytes / w.nbytes}
        rows.append(row)
    return rows


def _gate_check(report: Report, ys: np.ndarray, plain: np.ndarray) -> Check:
    """One max_rel over the whole run: a token whose output is small by itself proves nothing."""
    worst = max(row["max_rel"] for row in report.tables["projections"])
    gate = min(GATE_FACTOR * worst, GATE_CEILING)
    detail = (
        f"OUT of {len(ys)} tokens together; gate {GATE_FACTOR:.0f} × the worst single "
        f"projection, {worst:.1e}, at most {GATE_CEILING}"
    )
    return check("q4.magnitude_gate", distance(ys, plain).max_rel, gate, detail)


def _group_rows(weights: np.ndarray) -> list[Row]:
    """Reconstruction error of sample rows for other group sizes, by rule."""
    rows: list[Row] = []
    for rule, quantise in RULES.items():
        for size in GROUP_SIZES:
            if weights.shape[1] % size:
                continue
            groups = weights.reshape(-1, size)
            integers, scales = quantise(groups)
            d = distance(integers * scales.astype(np.float32), groups)
            bits = 4 + 16 / size
            rows.append({"rule": rule, "group": size, "bits": bits, "rms_rel": d.rms_rel})
    return rows


def _drift_rows(backend: str | None) -> list[Row]:
    """Int4 against float32 over many tokens of a small shape: does the cost of quantising grow?"""
    cfg = drift_config(backend)
    weights, xs = draw_weights(cfg, 0), draw_inputs(cfg, DRIFT_TOKENS, 0)
    params = device_params(weights)
    int4 = {name: quantize_q4(weights[name]) for name in LARGE}
    traces = run_traces(dataclasses.replace(params, **int4), cfg, xs, backend)
    plain = run_traces(params, cfg, xs, backend)
    return drift_rows(traces, plain)
