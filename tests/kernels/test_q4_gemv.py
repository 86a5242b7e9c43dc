"""The int4 kernel: its layout, its arithmetic (see q4_warps), and its lowering."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn_jax as gdn
from gdn_jax.quant.kernel_layout import Q4Kernel, from_kernel, to_kernel
from gdn_jax.quant.project import project
from pallas_kernels import jobs, q4_layout, tuning
from pallas_kernels.kernels import q4_gemv
from tests.support.contracts import Int4Product
from tests.support.q4_warps import balanced_digits, emulate
from tests.support.tools import pretend_device


def draw(seed: int, N: int, K: int, *lead: int) -> gdn.Q4Array:
    """Every integer, and scales of both signs over five octaves with one subnormal among them."""
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, (*lead, N, K // 8)).astype(np.int32)
    scales = rng.choice([-1, 1], (*lead, N, K // 32)) * 2 ** rng.uniform(-8, -3, (N, K // 32))
    scales[..., 0, 0] = 2.0**-20
    return gdn.Q4Array(jnp.asarray(words), jnp.asarray(scales.astype(np.float16)))


def rows_with_outliers(seed: int, B: int, K: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, K))
    x[:, rng.integers(0, K, K // 40 + 1)] *= 20
    return x.astype(np.float32)


class TestArithmeticOfOneSlice(Int4Product):
    """The kernel's warps in NumPy: the interpreter cannot run them."""

    LIMIT, SPLITS = 2.0**-23, 1

    def run(self, x: np.ndarray, w: gdn.Q4Array) -> np.ndarray:
        return emulate(x, w, math.gcd(self.SPLITS, w.shape[1] // 64)).sum(0)


class TestArithmeticOfTwoSlices(TestArithmeticOfOneSlice):
    SPLITS = 2


@given(st.integers(0, 10_000), st.integers(1, 2), st.integers(1, 2), st.integers(0, 2))
def test_the_layout_loses_no_bit_and_follows_its_equations(seed, rows, columns, stacked):
    N, K = 64 * rows, 64 * columns
    w = draw(seed, N, K, *[2] * stacked)
    blocks = q4_layout.pack(w.packed, w.scales)
    assert blocks.shape == (*[2] * stacked, rows, columns, 9, 64)
    for found, given_ in zip(q4_layout.unpack(blocks), (w.packed, w.scales), strict=True):
        np.testing.assert_array_equal(found, given_)
    flat = np.asarray(blocks).reshape(-1, rows, columns, 576)[-1]
    words = np.asarray(w.packed).reshape(-1, N, K // 8)[-1]
    halves = np.asarray(w.scales).reshape(-1, N, K // 32)[-1].view(np.uint16).astype(np.int64)
    for t, m, r, p, c in np.ndindex(rows, 4, 8, columns, 2):
        n, g = 64 * t + 16 * m + r, 2 * p + c
        pair = halves[n, g] | halves[n + 8, g] << 16
        assert flat[t, p, 512 + 16 * m + 2 * r + c] == np.int64(pair).astype(np.int32)
        for i, a in np.ndindex(4, 2):
            assert flat[t, p, 128 * m + 16 * r + 4 * i + 2 * c + a] == words[n + 8 * a, 4 * g + i]


@given(st.integers(0, 10_000), st.sampled_from([-120, -60, 0, 60, 120]))
def test_digits_hold_a_row_to_thirty_bits_of_its_largest(seed, octave):
    x = (rows_with_outliers(seed, 1, 128)[0] * 2.0**octave).astype(np.float32)
    digits, e = balanced_digits(x)
    value = (digits.astype(np.float64) * 256.0 ** np.arange(4)).sum(-1) * 2.0 ** (e - 30)
    largest = max(np.abs(x.astype(np.float64)).max(), 2.0**-91)
    assert np.abs(value - x).max() <= 2.0**-30 * largest
    assert np.abs(x).max() < 2.0**e


def lowered(f: Any, *args: Any) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def blocks_of(N: int, K: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((N // 64, K // 64, 9, 64), jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SHAPES = [(16384, 5120), (5120, 6144), (64, 64), (192, 448)]
CASES = [(*shape, 1) for shape in SHAPES] + [(5120, 6144, 3), (16384, 5120, 64), (64, 704, 8)]


@pytest.mark.parametrize(("N", "K", "B"), CASES)
def test_every_shape_lowers_for_cuda(N, K, B):
    args = floats(B, K), blocks_of(N, K), floats(8)

    def sums(x, w, after):
        return q4_gemv.gemv(x, w, after=after)

    text = lowered(sums, *args)
    assert text.count("mosaic_gpu_v2") == 1
    call = next(line for line in text.splitlines() if "mosaic_gpu_v2" in line)
    assert "tensor<8xf32>" in call
    splits = tuning.q4_plan(B, N // 64, K // 64).splits
    assert text.count("stablehlo.add") == splits - 1
    assert jax.eval_shape(sums, *args).shape == (B, N)
    assert jax.eval_shape(q4_gemv.gemv_parts, *args[:2]).shape == (splits, B, N)


@pytest.mark.parametrize(("B", "splits"), [(1, 10), (6, 16)])
def test_matrices_of_one_width_share_a_launch_and_the_digits_memory(B, splits):
    def launched(x, *weights):
        parts = [q4_gemv.job(x, w) for w in weights]
        assert parts[0].scratch == parts[1].scratch
        return [out for (out,) in jobs.launch(parts, name="both")]

    args = floats(B, 5120), blocks_of(10240, 5120), blocks_of(6144, 5120)
    assert lowered(launched, *args).count("mosaic_gpu_v2") == 1
    shapes = [out.shape for out in jax.eval_shape(launched, *args)]
    assert shapes == [(splits, B, 10240), (splits, B, 6144)]


@given(st.integers(1, 70), st.integers(1, 300), st.integers(1, 300))
def test_a_plan_divides_its_work_and_fits_into_shared_memory(B, row_tiles, steps):
    plan = tuning.q4_plan(B, row_tiles, steps)
    mine = steps // plan.splits
    assert mine * plan.splits == steps
    assert mine % plan.chunk == 0
    assert 512 * mine * -(-min(B, plan.rows) // 2) <= 48 * 1024


def test_the_27b_shapes_have_short_slices():
    for row_tiles, steps, splits in ((256, 80, 16), (80, 96, 12), (1, 1, 1), (4, 11, 11)):
        assert tuning.q4_plan(8, row_tiles, steps).splits == splits


def test_sizes_that_do_not_fit_are_refused():
    x, blocks = jnp.zeros((1, 128)), jnp.zeros((1, 2, 9, 64), jnp.int32)
    for args in ((x[:, :64], blocks), (x, blocks[None]), (x, blocks[..., :8, :]), (x[0], blocks)):
        with pytest.raises(ValueError, match="do not fit each other"):
            q4_gemv.gemv_parts(*args)
        with pytest.raises(ValueError, match="do not fit each other"):
            q4_gemv.gemv(*args)
    with pytest.raises(ValueError, match="2 blocks of columns cannot be divided"):
        q4_gemv.gemv_parts(x, blocks, plan=tuning.Q4Plan(1, 3, 1, 1, 1))
    assert q4_gemv.gemv(x[:0], blocks).shape == (0, 64)


def test_the_kernels_form_is_a_weight_like_any_other():
    w, x = draw(0, 128, 192), jnp.asarray(rows_with_outliers(1, 3, 192))
    kernel = to_kernel(w)
    assert (kernel.shape, kernel.ndim, kernel.nbytes) == (w.shape, 2, w.nbytes)
    jax.tree.map(np.testing.assert_array_equal, from_kernel(kernel), w)
    for activations in ("f32", "q8"):
        expected = gdn.q4_matmul(x, w, activations=activations, backend="xla")
        found = gdn.q4_matmul(x, kernel, activations=activations, backend="xla")
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(project(x, kernel), project(x, w))
    joined = Q4Kernel(jnp.concatenate([kernel.blocks] * 2, axis=-4))
    np.testing.assert_array_equal(from_kernel(joined).packed, jnp.tile(w.packed, (2, 1)))


def test_what_has_no_kernels_form_says_why():
    for N, K in ((96, 64), (64, 96)):
        reason = f"weights are [{N}, {K}]; the int4 kernel needs N and K to be multiples of 64"
        assert q4_layout.unavailable_reason(N, K) == reason
        with pytest.raises(gdn.ShapeError, match="multiples of 64"):
            to_kernel(draw(0, N, K))
    with pytest.raises(gdn.ShapeError, match=r"needed \[.., K=64\]"):
        gdn.q4_matmul(jnp.zeros((1, 128)), to_kernel(draw(0, 64, 64)))
    with pytest.raises(gdn.ShapeError, match=r"w.blocks has shape \(1, 1, 1, 9, 64\)"):
        gdn.q4_matmul(jnp.zeros((1, 64)), to_kernel(draw(0, 64, 64, 1)))


@pytest.mark.parametrize(
    ("device", "text"),
    [
        (("9.0", "cpu"), "no CUDA GPU, the device is cpu; backend='xla' runs it"),
        (("7.5", "gpu"), "compute capability 7.5, the kernel needs 8.0; backend='xla' runs it"),
    ],
)
def test_a_device_without_the_kernel(monkeypatch, device, text):
    pretend_device(monkeypatch, *device)
    w = to_kernel(draw(0, 64, 64))
    with pytest.raises(
        gdn.BackendUnavailableError, match="q4_matmul on backend 'pallas'"
    ) as caught:
        gdn.q4_matmul(jnp.zeros((1, 64)), w, backend="pallas")
    assert text in str(caught.value)
    assert gdn.q4_matmul(jnp.zeros((1, 64)), w).shape == (1, 64)


def test_a_device_with_the_kernel(monkeypatch):
    pretend_device(monkeypatch)
    x = jnp.zeros((2, 3, 64))
    assert gdn.select_backend("q4_matmul") == "pallas"
    for w, named, kernels in [
        (draw(0, 64, 64), "pallas", 1),
        (to_kernel(draw(0, 64, 64)), None, 1),
        (draw(0, 64, 64), None, 0),
        (draw(0, 96, 64), None, 0),
    ]:
        text = lowered(lambda x, w, named=named: gdn.q4_matmul(x, w, backend=named), x, w)
        assert text.count("mosaic_gpu_v2") == kernels
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), to_kernel(draw(0, 64, 64)))
    assert "mosaic_gpu_v2" in lowered(jax.vmap(gdn.q4_matmul, (None, 0)), x, stack)
    with pytest.raises(gdn.BackendUnavailableError, match=r"\[96, 64\].*multiples of 64.*'xla'"):
        gdn.q4_matmul(x, draw(0, 96, 64), backend="pallas")
    with pytest.raises(gdn.BackendUnavailableError, match="activations 'f32', not 'q8'"):
        gdn.q4_matmul(x, draw(0, 64, 64), activations="q8", backend="pallas")
