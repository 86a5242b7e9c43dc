"""The bench's check of the middle kernel, computed by the interpreter."""

import functools
from typing import Any

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels.kernels.middle
import pallas_kernels.support
from gdn_jax import oracle
from gdn_jax.bench.suites import middle
from gdn_jax.config import GDNConfig

CFG = GDNConfig(64, 1, 2, 64, 64)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pallas_kernels.kernels.middle.middle
    run = functools.partial(kernel, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(pallas_kernels.kernels.middle, "middle", run)
    monkeypatch.setattr(pallas_kernels.support, "has_clusters", lambda: False)
    monkeypatch.setattr(middle, "select_backend", lambda *_, **__: "pallas")


def test_the_kernel_passes_its_check_and_a_wrong_one_does_not(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workload,) = middle.workloads(CFG, [2], ["pallas"])
    assert workload.make().check() <= workload.limit

    kernel = pallas_kernels.kernels.middle.middle

    def elsewhere(projected: Any, small: Any, S: Any, hist: Any, place: Any, *rest: Any, **to: Any):
        return kernel(projected, small, S, hist, place._replace(layer=place.layer - 1), *rest, **to)

    monkeypatch.setattr(pallas_kernels.kernels.middle, "middle", elsewhere)
    assert workload.make().check() > workload.limit


def test_the_reference_is_the_oracle_s_step() -> None:
    drawn = middle.draw(CFG, 1)
    exact = middle.exact(CFG, drawn)
    parts = {name: drawn[name].astype(float).sum(0)[0] for name in ("qkv", "z", "b", "a")}
    weights = {f"in_proj_{name}": part[:, None] for name, part in parts.items()}
    weights |= {n: drawn[n].astype(float) for n in ("A_log", "dt_bias")}
    weights |= {"conv_weight": drawn["conv"].astype(float), "norm_weight": drawn["norm"]}
    weights["out_proj"] = np.zeros((1, CFG.value_dim))
    S, hist = (drawn[name][0].astype(float) for name in ("S", "hist"))
    step = oracle.step(weights, CFG, S, hist, np.ones(1))
    assert exact["onn"][0] == pytest.approx(step["ONN"].ravel(), rel=1e-12)
    assert exact["S"][0].ravel() == pytest.approx(step["S"].ravel(), rel=1e-12)
    assert exact["frame"][0] == pytest.approx(step["HIST"][-1], rel=1e-12)
