"""The kernel between two blocks against float64, and for CUDA at the sizes of real models."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.kernels.residual_norm import residual_norm
from tests.support.mosaic import VALUES
from tests.support.tools import assert_close, assert_same_bits

EPS = 1e-2
"""Large, so that a norm without it is found."""


def draw(splits: int, B: int, D: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = (splits, B, D), (B, D), (D,)
    parts, residual, weight = (rng.normal(size=s).astype(np.float32) for s in shapes)
    scale = 10.0 ** np.arange(-1, B - 1, dtype=np.float32)[:, None]
    return parts * scale, residual * scale, weight


def run(*drawn: np.ndarray, eps: float = EPS) -> list[np.ndarray]:
    found = residual_norm(*map(jnp.asarray, drawn), eps=eps, size=1, interpret=VALUES)
    return [np.asarray(y) for y in found]


@pytest.mark.parametrize(("splits", "D"), [(1, 128), (5, 384)])
def test_the_sum_and_its_norm_agree_with_float64(splits: int, D: int) -> None:
    parts, residual, weight = draw(splits, 3, D)
    wide = [x.astype(np.float64) for x in (parts, residual, weight)]
    x = wide[0].sum(0) + wide[1]
    normed = (1 + wide[2]) * x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    found = run(parts, residual, weight)
    for b in range(3):
        assert_close(found[0][b], x[b], 1e-6, f"x of row {b}")
        assert_close(found[1][b], normed[b], 1e-6, f"norm of row {b}")


def test_a_row_has_the_bits_of_its_solo_run() -> None:
    parts, residual, weight = draw(3, 3, 256)
    spoilt = residual.copy()
    spoilt[0] = np.nan
    every = run(parts, spoilt, weight)
    alone = run(parts[:, 2:], residual[2:], weight)
    for found, wanted in zip(every, alone, strict=True):
        assert_same_bits(found[2], wanted[0])
        assert np.isnan(found[0]).all()
        assert np.isfinite(found[1]).all()


@pytest.mark.parametrize("pieces", [1, 5, 8, 20, 40])
def test_a_row_is_divided_evenly(pieces: int) -> None:
    assert pieces % tuning.norm_ctas(pieces) == 0
    assert tuning.norm_ctas(pieces) in (1, 2, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("splits", "B", "D"), [(34, 1, 1024), (12, 8, 5120)])
def test_the_kernel_lowers_for_cuda(splits: int, B: int, D: int) -> None:
    def like(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    lowered = jax.jit(functools.partial(residual_norm, eps=EPS)).trace(
        like(splits, B, D), like(B, D), like(D)
    )
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "residual_norm" in text
