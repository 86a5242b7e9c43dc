"""The kernel of float weights: interpreted against float64, and lowered for CUDA.

The interpreter ignores layouts, so each configuration is lowered for CUDA as well.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.jobs import launch
from pallas_kernels.kernels import float_gemv
from tests.support.mosaic import VALUES
from tests.support.tools import assert_same_bits

MAX_ERROR = 6e-7
"""Of the root mean square of y, the square root of K for normal x and w. A GPU adds the lanes up
in a tree, the interpreter one after another."""

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def draw(B: int, N: int, K: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng((B, N, K))
    x, w = rng.standard_normal((B, K)), rng.standard_normal((N, K))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, DTYPES[dtype])


def run(x: jax.Array, w: jax.Array, **options) -> np.ndarray:
    return np.asarray(float_gemv.gemv(x, w, **options, interpret=VALUES))


def check(y: np.ndarray, x: jax.Array, w: jax.Array) -> None:
    ref = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert y.shape == ref.shape
    assert y.dtype == np.float32
    error = np.abs(y - ref).max() / x.shape[1] ** 0.5
    assert error <= MAX_ERROR, error


@pytest.mark.parametrize(
    ("B", "N", "K", "dtype"),
    [
        (1, 1, 64, "float32"),
        (2, 5, 96, "float32"),
        (3, 67, 160, "float32"),
        (1, 48, 1280, "float32"),
        (8, 48, 96, "float32"),
        (11, 21, 64, "float32"),
        (2, 5, 96, "bfloat16"),
        (3, 67, 160, "bfloat16"),
        (8, 48, 1280, "bfloat16"),
        (1, 5, 160, "float16"),
        (9, 1, 96, "float16"),
    ],
)
def test_agrees_with_float64(B: int, N: int, K: int, dtype: str) -> None:
    x, w = draw(B, N, K, dtype)
    check(run(x, w), x, w)


@pytest.mark.parametrize(
    ("tiling", "dtype"),
    [
        ((1, 10, 16), "bfloat16"),
        ((2, 4, 16), "float16"),
        ((4, 2, 8), "bfloat16"),
        ((2, 1, 16), "float32"),
    ],
)
def test_every_tiling_agrees_with_float64(tiling: tuple[int, int, int], dtype: str) -> None:
    x, w = draw(2, 35, 1280, dtype)
    check(run(x, w, tiling=tiling), x, w)


@pytest.mark.parametrize("B", [1, 11])
def test_takes_nothing_of_what_it_only_follows(B: int) -> None:
    x, w = draw(B, 21, 192)
    check(run(x, w, after=jnp.full((7,), jnp.nan)), x, w)


@pytest.mark.parametrize(("B", "bad"), [(3, 0), (11, 10), (11, 5)])
@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_a_row_that_is_not_finite_touches_no_other(B: int, bad: int, value: float) -> None:
    x, w = draw(B, 21, 64)
    y, spoilt = run(x, w), run(x.at[bad, 3].set(value), w)
    assert not np.isfinite(spoilt[bad]).any()
    keep = np.arange(B) != bad
    assert_same_bits(spoilt[keep], y[keep])


def test_rows_do_not_depend_on_how_many_there_are_of_weights() -> None:
    """The rows left over add up in the order of all others."""
    x, w = draw(3, 48, 640)
    assert_same_bits(run(x, w[:19]), run(x, w)[:, :19])


def test_jobs_of_different_sizes_share_a_launch_and_k_slices_add_up() -> None:
    (x, w), (_, few) = draw(3, 37, 1280, "bfloat16"), draw(3, 6, 1280)
    jobs = [
        float_gemv.job(x, few, splits=4),
        float_gemv.job(x, w),
        float_gemv.job(x, few),
    ]
    (parts,), (y,), (whole,) = launch(jobs, name="three", interpret=VALUES)
    assert (parts.shape, y.shape, whole.shape) == ((4, 3, 6), (1, 3, 37), (1, 3, 6))
    check(np.asarray(y[0]), x, w)
    check(np.asarray(whole[0]), x, few)
    check(np.asarray(parts[0] + parts[1] + parts[2] + parts[3]), x, few)
    check(np.asarray(parts[1]), x[:, 320:640], few[:, 320:640])


def test_no_rows_of_x_are_no_rows_of_y() -> None:
    assert float_gemv.gemv(*draw(0, 5, 64)).shape == (0, 5)


SHIPPED = [(10240, 5120), (5120, 6144), (17, 2048)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "K"), SHIPPED)
def test_lowers_for_cuda_at_real_sizes(N: int, K: int, dtype: str) -> None:
    for B in (1, 8):
        shapes = [(B, K), (N, K)]
        types = [jnp.float32, DTYPES[dtype]]
        operands = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]
        traced = float_gemv.gemv.trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu_v2") == 1


def test_what_does_not_fit_is_refused() -> None:
    x, w = draw(2, 8, 128)
    assert "K to be a multiple of 32" in (float_gemv.unavailable_reason(8, 80) or "")
    assert float_gemv.unavailable_reason(1, 96) is None
    refused = [
        (lambda: float_gemv.gemv(x[:, :80], w[:, :80]), "multiple of 32"),
        (lambda: float_gemv.gemv(x[:, :64], w), "do not fit"),
        (lambda: float_gemv.job(x, w, splits=8), "8 splits do not fit"),
        (lambda: float_gemv.gemv(x.astype(jnp.bfloat16), w), "x is bfloat16"),
        (lambda: float_gemv.gemv(x, w.astype(jnp.int8)), "w int8"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
