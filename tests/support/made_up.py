"""A report made up for the tests of its rendering, with plausible numbers."""

from typing import Any

import numpy as np

from gdn_jax import PRESETS
from gdn_jax.layer.trace import trace_shapes
from gdn_jax.report.record import Check, Report, Row

PAIRS = ("ours to transformers", "ours to float64", "transformers to float64")
OPERATORS = tuple(trace_shapes(PRESETS["tiny"]))
Q4_PAIRS = ("int4 to float32", "int4 to float64 with the dequantised weights")
PER_HEAD = {"B", "A", "BETA", "G", "Q", "K", "ON", "ONN", "S"}


def report_data(tokens: int = 5, heads: int = 4, steps: int = 512) -> dict[str, Any]:
    """The JSON form of :func:`made_up_report`."""
    return made_up_report(tokens, heads, steps).as_dict()


def made_up_report(tokens: int = 5, heads: int = 4, steps: int = 512) -> Report:
    """A report of the shape that ``verify`` makes, with plausible numbers."""
    rng = np.random.default_rng(3)

    def near(size: float) -> float:
        return float(size * 10 ** rng.uniform(-0.3, 0.3))

    report = Report(
        {
            "versions": {"gdn-jax": "0.1.0", "jax": "0.11.2"},
            "devices": ["CPU 0", "CPU 1"],
            "commit": None,
            "x64": False,
        },
        {"preset": "qwen3.5-27b", "layers": 48, "tokens": tokens, "seed": 20250101},
    )
    for name, value, limit, unit in (
        ("f32.oracle", 9.1e-7, 1e-4, "max_rel"),
        ("f32.float64", 1.234e-6, 3e-6, "max_rel"),
        ("f32.reset_replay", 0.0, 0.0, "unequal elements"),
        ("f32.cross_layer", 0.0, 0.0, "unequal elements"),
        ("f32.host_vs_device", 0.0, 0.0, "unequal elements"),
        ("f32.residency", 0.0, 0.0, "faults"),
        ("f32.drift512", 8.21e-7, 1e-5, "max_rel"),
    ):
        words = (
            f"{tokens} tokens, worst at token {tokens - 1}, of 25 600 elements",
            f"{name} shows that the seven steps are right on these weights",
            "that other weights or longer sequences stay as close",
        )
        report.checks.append(Check(name, True, value, limit, unit, *words))
    report.tables["state"] = [
        {"part": "S per layer", "shape": "[1, 48, 128, 128]", "bytes": 3145728},
        {"part": "history per layer", "shape": "[1, 3, 10240]", "bytes": 122880},
        {"part": "whole stack", "shape": "48 layers", "bytes": 156893184},
    ]
    limits = dict(zip(PAIRS, (1e-4, 3e-6, None), strict=True))

    def token_rows(pair: str, size: float, limit: float | None) -> list[Row]:
        return [
            {
                **{"pair": pair, "token": t, "max_abs_err": near(2 * size)},
                **{"max_abs_ref": near(2.5), "max_rel": near(0.8 * size)},
                **{"rms_rel": near(0.4 * size), "limit": limit},
                "ok": None if limit is None else True,
            }
            for t in range(tokens)
        ]

    def operator_rows(sizes: dict[str, float]) -> list[Row]:
        return [
            {
                **{"operator": op, "pair": pair, "token": t},
                **{"max_rel": near((4 + 0.3 * i) * size), "rms_rel": near((2 + 0.1 * i) * size)},
                "worst_head": int(rng.integers(48)) if op in PER_HEAD else None,
                "worst_head_rel": near(9 * size) if op in PER_HEAD else None,
            }
            for i, op in enumerate(OPERATORS)
            for pair, size in sizes.items()
            for t in range(tokens)
        ]

    report.tables["tokens"] = [r for p, limit in limits.items() for r in token_rows(p, 1e-6, limit)]
    report.tables["operators"] = operator_rows(dict.fromkeys(PAIRS, 1e-7))
    kept, norm = np.ones(heads), np.zeros(heads)
    pace = 10.0 ** np.linspace(-4, -0.5, heads)
    report.tables["decay"] = []
    for t in range(steps):
        decay = np.exp(-pace * rng.uniform(0.5, 1.5, heads))
        kept, norm = kept * decay, np.sqrt((decay * norm) ** 2 + rng.uniform(0.2, 1, heads))
        for h in range(heads):
            values = {"decay": float(decay[h]), "kept": float(kept[h]), "S_norm": float(norm[h])}
            report.tables["decay"].append({"head": h, "token": t} | values)
    report.tables["drift"] = [
        {"token": t, "max_rel": near(5e-7), "rms_rel": near(3e-7), "S_rms_rel": near(1e-7)}
        for t in range(steps)
    ]
    report.tables["round_trip"] = [
        {
            **{"what": "one token there and back", "median_us": 41.72, "iqr_us": 3.4},
            **{"repetitions": 1200, "clock_resolution_us": 0.04},
        }
    ]
    report.tables["q4_tokens"] = token_rows(Q4_PAIRS[0], 1e-1, None)
    report.tables["q4_operators"] = operator_rows(dict(zip(Q4_PAIRS, (2e-2, 1e-7), strict=True)))
    report.tables["projections"] = [
        {
            **{"projection": name, "max_rel": near(7e-2), "rms_rel": near(8e-2)},
            **{"rms_rel_q8_activations": near(8.1e-2), "float32_MiB": N * K * 4 / 2**20},
            **{"int4_MiB": N * K * 4.5 / 8 / 2**20, "ratio": 32 / 4.5},
        }
        for name, N, K in (
            *(("in_proj_qkv", 10240, 5120), ("in_proj_z", 6144, 5120)),
            ("out_proj", 5120, 6144),
        )
    ]
    report.tables["q4_groups"] = [
        {"rule": rule, "group": size, "bits": 4 + 16 / size, "rms_rel": near(8e-2)}
        for rule in ("q4_0", "mse")
        for size in (16, 32, 64, 128)
    ]
    report.tables["q4_drift"] = [
        {"token": t, "max_rel": near(0.2), "rms_rel": near(0.2), "S_rms_rel": near(0.1)}
        for t in range(steps)
    ]
    return report
