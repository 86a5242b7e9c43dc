"""The int4 product: both conventions against float64, and a whole layer on int4 weights."""

import dataclasses
import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.layer.params import LARGE
from gdn_jax.quant import q4_matmul as forms
from gdn_jax.quant.q4_matmul import quantize_q8
from tests.quant.test_q4_array import random_q4
from tests.support import tools
from tests.support.cases import LAYER, LayerCase
from tests.support.contracts import Int4Product, decoded
from tests.support.tools import MAX_REL, assert_close, assert_refused, assert_same_bits

Q8_0 = gguf.GGMLQuantizationType.Q8_0

MAX_REL_SUM = MAX_REL["sum"]

q4_matmul = jax.jit(gdn.q4_matmul, static_argnames=("activations", "backend"))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(seed: int, N: int, K: int) -> gdn.Q4Array:
    return gdn.quantize_q4(normal(seed, N, K))


def with_outliers(seed: int, *shape: int) -> np.ndarray:
    x = normal(seed, *shape)
    x[..., ::29] *= 20
    return x


@pytest.mark.parametrize("lead", [(), (8,), (2, 4), (3, 3)])
@pytest.mark.parametrize(("N", "K"), [(48, 96), (7, 1024)])
def test_f32_against_float64(lead: tuple[int, ...], N: int, K: int):
    w, x = weights(0, N, K), with_outliers(1, *lead, K)
    y = q4_matmul(x, w)
    assert y.shape == (*lead, N)
    assert y.dtype == jnp.float32
    assert_close(y, x.astype(np.float64) @ decoded(w).T, MAX_REL_SUM)


class TestByGroups(Int4Product):
    """The CPU's form, wherever this runs."""

    form = staticmethod(jax.jit(forms._by_groups))

    def run(self, x: np.ndarray, w: gdn.Q4Array) -> jax.Array:
        return self.form(x, w)

    def test_any_leading_axes(self) -> None:
        x, w = self.draw(6, 40, 512)
        exact = x.astype(np.float64) @ decoded(w).T
        for rows, wanted in ((x.reshape(2, 3, -1), exact.reshape(2, 3, -1)), (x[0], exact[0])):
            assert_close(self.form(rows, w), wanted, self.LIMIT)


class TestDequantised(TestByGroups):
    """The form of every other platform."""

    form = staticmethod(jax.jit(forms._dequantised))


def test_other_platforms_lower_to_the_dequantised_form():
    w, x = weights(20, 8, 64), jnp.ones((1, 64))
    lowered = q4_matmul.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    here = jax.jit(forms._by_groups).lower(x, w).as_text()
    assert lowered.count("shift_right_arithmetic") == 1
    assert here.count("shift_right_arithmetic") == 32


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_q8_is_the_integer_equation(rows: int):
    """Activations quantised by the gguf package, integers summed exactly, in float64."""
    N, K = 24, 256
    w, x = weights(2, N, K), with_outliers(3, rows, K)
    x[0, :32] = 0.0
    blocks = gguf.quants.quantize(x, Q8_0).reshape(rows, -1, 34)
    q = blocks[..., 2:].view(np.int8).astype(np.int64)
    d = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)[..., 0]
    unit = dataclasses.replace(w, scales=jnp.ones_like(w.scales))
    n = decoded(unit).astype(np.int64).reshape(N, -1, 32)
    scales = np.asarray(w.scales).astype(np.float64)
    expected = np.einsum("ng,rg,rng->rn", scales, d, np.einsum("ngk,rgk->rng", n, q))
    y = q4_matmul(x, w, activations="q8")
    assert_close(y, expected, MAX_REL_SUM)
    exact = x.astype(np.float64) @ decoded(w).T
    assert 1e-3 < tools.max_rel(y, exact) < 5e-2


@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-30, 6),
    kind=st.sampled_from(["normal", "halves", "sparse"]),
)
def test_q8_activations_have_the_bits_of_gguf(seed: int, exponent: int, kind: str):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, 96)).astype(np.float32) * np.float32(10.0**exponent)
    if kind == "halves":
        x = rng.integers(-254, 255, x.shape).astype(np.float32) / 2
        x[:, ::32] = 127.0
    elif kind == "sparse":
        x[rng.random(x.shape) < 0.9] = 0.0
        x[0] = 0.0
    q, d = jax.jit(quantize_q8)(x)
    q, d = np.asarray(q).reshape(5, 3, 32).astype(np.int8), np.asarray(d)
    found = np.concatenate([d[..., None].view(np.uint8), q.view(np.uint8)], axis=-1)
    assert_same_bits(found.reshape(5, -1), gguf.quants.quantize(x, Q8_0))


def test_q8_scales_at_the_boundaries_of_float16():
    """``max|x|/127`` halfway between two float16 numbers, and one float32 step to either side."""
    below = np.arange(0x2000, 0x5000, 5, dtype=np.uint16)
    d = np.stack([b.view(np.float16).astype(np.float64) for b in (below, below + np.uint16(1))])
    halfway = (d.mean(axis=0) * 127).astype(np.float32).view(np.int32)
    x = np.repeat(np.stack([halfway - 1, halfway, halfway + 1]).view(np.float32), 32, axis=-1)
    q, d = jax.jit(quantize_q8)(x)
    found = gguf.quants.quantize(x, Q8_0).reshape(3, -1, 34)
    assert_same_bits(np.asarray(d).view(np.uint8).reshape(3, -1, 2), found[..., :2])
    assert_same_bits(np.asarray(q).astype(np.uint8).reshape(3, -1, 32), found[..., 2:])


def test_scales_of_either_sign_and_subnormal():
    w = random_q4(4, 16, 64)
    x = normal(5, 3, 64)
    assert_close(q4_matmul(x, w), x.astype(np.float64) @ decoded(w).T, MAX_REL_SUM)
    tiny = dataclasses.replace(w, scales=jnp.full((16, 2), 3 * 2.0**-24, jnp.float16))
    assert_close(q4_matmul(x, tiny), x.astype(np.float64) @ decoded(tiny).T, MAX_REL_SUM)


@pytest.mark.parametrize("activations", ["f32", "q8"])
def test_a_row_does_not_see_its_neighbours(activations: str):
    w, x = weights(6, 32, 128), normal(7, 8, 128)
    clean = np.asarray(q4_matmul(x, w, activations=activations))
    for bad in (np.nan, np.inf, 1e30):
        spoilt = x.copy()
        spoilt[3, 40] = bad
        y = np.asarray(q4_matmul(spoilt, w, activations=activations))
        assert_same_bits(np.delete(y, 3, 0), np.delete(clean, 3, 0))
        assert np.isfinite(bad) or not np.isfinite(y[3]).any()


@pytest.mark.parametrize("activations", ["f32", "q8"])
def test_vmap_over_rows_and_over_a_stack(activations: str):
    product = functools.partial(q4_matmul, activations=activations)
    w, x = random_q4(8, 3, 16, 64), normal(9, 4, 64)
    each = [product(x, jax.tree.map(lambda a, i=i: a[i], w)) for i in range(3)]
    assert_close(jax.vmap(product, (None, 0))(x, w), np.stack(each), MAX_REL_SUM)
    assert_close(jax.vmap(product, (0, None))(x, jax.tree.map(lambda a: a[0], w)), each[0], 1e-6)
    _, scanned = lax.scan(lambda carry, w: (carry, product(x, w)), 0, w)
    assert_close(scanned, np.stack(each), MAX_REL_SUM)


def test_gradient_of_the_activations():
    w, x = weights(10, 12, 64), normal(11, 2, 64)
    gradient = jax.grad(lambda x: jnp.sum(q4_matmul(x, w)))(jnp.asarray(x))
    assert_close(gradient, np.broadcast_to(decoded(w).sum(0), x.shape), MAX_REL_SUM)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_loop_does_not_keep_the_weights_in_float32(rows: int):
    """Scratch memory of a scan over tokens stays below the int4 weights' own bytes."""
    w = weights(12, 512, 1024)
    xs = jnp.asarray(normal(13, 3, rows, 1024))

    @jax.jit
    def run(xs: jax.Array, w: gdn.Q4Array) -> jax.Array:
        return lax.scan(lambda carry, x: (carry, gdn.q4_matmul(x, w)), 0, xs)[1]

    memory = run.lower(xs, w).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < w.nbytes < 512 * 1024 * 4 / 7
    stepped = np.stack([np.asarray(q4_matmul(x, w)) for x in xs])
    assert_same_bits(run(xs, w), stepped)


def q4_layer(case: LayerCase) -> tuple[gdn.GDNParams, dict[str, np.ndarray], tuple]:
    """A case's layer with int4 projections, the same weights decoded by gguf, state and inputs."""
    params, state, xs = tools.layer(case)
    quantised = {name: gdn.quantize_q4(getattr(params, name)) for name in LARGE}
    host = {f.name: np.asarray(getattr(params, f.name)) for f in dataclasses.fields(params)}
    host |= {name: decoded(w) for name, w in quantised.items()}
    return dataclasses.replace(params, **quantised), host, (state, xs)


@pytest.mark.parametrize("name", ["tiny", "tiny_wide", "nine_rows"])
def test_every_operator_of_a_layer(name: str):
    """Against the float64 oracle on independently decoded weights, token by token."""
    case = LAYER[name]
    params, host, (state, xs) = q4_layer(case)
    expected = [
        oracle.layer_trace(
            host, case.cfg, np.asarray(xs[b]), S=np.asarray(s), conv_hist=np.asarray(h)
        )
        for b, (s, h) in enumerate(zip(state.S, state.conv_hist, strict=True))
    ]
    for t in range(case.T):
        y, state, trace = tools.trace_step(params, state, xs[:, t], case.cfg)
        for entry, value in trace.items():
            reference = np.stack([row[entry][t] for row in expected])
            assert_close(value, reference, MAX_REL["float32"], f"{entry} of token {t}")
        assert_same_bits(y, trace["OUT"])


@pytest.mark.parametrize("name", ["tiny", "nine_rows"])
def test_a_layer_against_itself(name: str):
    """decode, decode_step, trace_step and the bank agree bit for bit on int4 weights."""
    case = LAYER[name]
    params, _, (start, xs) = q4_layer(case)
    ys, end = tools.decode(params, start, xs, case.cfg)
    state = start
    for t in range(case.T):
        y, after = tools.decode_step(params, state, xs[:, t], case.cfg)
        traced, traced_state, _ = tools.trace_step(params, state, xs[:, t], case.cfg)
        assert_same_bits((y, after), (traced, traced_state))
        assert_same_bits(y, ys[:, t])
        state = after
    assert_same_bits(state, end)
    bank = gdn.LayerBank(case.cfg, 2).preload(1, params)
    stack = jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x), x]), start)
    host, stack = bank.decode_host(stack, 1, np.asarray(xs))
    assert_same_bits(host, ys)
    assert_same_bits(jax.tree.map(lambda x: x[1], stack), end)


def test_params_of_the_wrong_shape_are_refused():
    params, _, (state, xs) = q4_layer(LAYER["tiny"])
    cfg = LAYER["tiny"].cfg

    def step(**changes: gdn.Q4Array) -> None:
        gdn.decode_step(dataclasses.replace(params, **changes), state, xs[:, 0], cfg)

    qkv, z = params.in_proj_qkv, params.in_proj_z
    assert isinstance(qkv, gdn.Q4Array)
    assert isinstance(z, gdn.Q4Array)
    assert_refused(
        lambda: step(in_proj_qkv=z), "params.in_proj_qkv is int4 of shape (32, 64)", "C=96, D=64"
    )
    assert_refused(lambda: step(out_proj=z), "params.out_proj", "(32, 64)", "D=64, HV*V=32")
    broken = dataclasses.replace(qkv, scales=qkv.scales[:, :1])
    assert_refused(lambda: step(in_proj_qkv=broken), "params.in_proj_qkv.packed", "K/8=4")
    stack = jax.tree.map(lambda x: x[None], qkv)
    assert_refused(lambda: step(in_proj_qkv=stack), "params.in_proj_qkv.scales", "(1, 96, 2)")
    assert_refused(lambda: step(in_proj_b=z), "params.in_proj_b is a Q4Array")


def test_refusals():
    w, x = weights(14, 8, 64), normal(15, 2, 64)
    assert_refused(lambda: gdn.q4_matmul(x[:, :32], w), "x has shape (2, 32)", "K=64")
    assert_refused(lambda: gdn.q4_matmul(x.astype(np.float16), w), "x has", "float16", "float32")
    assert_refused(lambda: gdn.q4_matmul(np.float32(1), w), "x has shape ()", "K=64")
    assert_refused(lambda: gdn.q4_matmul(x.tolist(), w), "x is a list")
    assert_refused(
        lambda: gdn.q4_matmul(x, gdn.dequantize(w)),  # pyright: ignore[reportArgumentType]
        "needed a gdn_jax.Q4Array",
    )
    stack = jax.tree.map(lambda a: a[None], w)
    assert_refused(lambda: gdn.q4_matmul(x, stack), "w.scales has shape (1, 8, 2)")
    assert_refused(lambda: gdn.q4_matmul(x, w, activations="int8"), "'int8'", "f32, q8")
    assert_refused(lambda: gdn.q4_matmul(x, w, backend="cuda"), "'cuda'", "xla, pallas")


def test_a_named_backend_runs_or_raises():
    w, x = weights(16, 8, 64), normal(17, 2, 64)
    assert_same_bits(gdn.q4_matmul(x, w, backend="xla"), gdn.q4_matmul(x, w))
    if gdn.select_backend("q4_matmul") == "xla":
        error = gdn.BackendUnavailableError
        assert_refused(lambda: gdn.q4_matmul(x, w, backend="pallas"), "q4_matmul", error=error)
