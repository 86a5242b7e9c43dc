"""Each of the seven steps against an independent statement of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.layer import steps
from gdn_jax.ops.gates import softplus
from tests.support.cases import LAYER
from tests.support.tools import MAX_REL, assert_close, assert_same_bits, layer

ULPS = 4 * 2.0**-23
"""A few roundings of elementary functions, relative to the largest value."""

CASE = LAYER["tiny_wide"]
CFG = CASE.cfg
PARAMS, _, XS = layer(CASE)
X = XS[0]

project = jax.jit(steps.project)
gated_rms_norm = jax.jit(steps.gated_rms_norm)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def projected() -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x) for x in jax.jit(steps.input_projections)(PARAMS, X))


def test_projections_are_matrix_products() -> None:
    qkv, z, b, a, _, _ = projected()
    for out, w in ((qkv, "in_proj_qkv"), (z, "in_proj_z"), (b, "in_proj_b"), (a, "in_proj_a")):
        matrix = np.asarray(getattr(PARAMS, w), np.float64)
        assert_close(
            out, np.einsum("nd,bd->bn", matrix, np.asarray(X, np.float64)), MAX_REL["sum"], w
        )


def test_b_makes_beta_and_a_makes_the_log_decay() -> None:
    _, _, b, a, beta, g = (np.asarray(x, np.float64) for x in projected())
    A_log, dt_bias = (np.asarray(x, np.float64) for x in (PARAMS.A_log, PARAMS.dt_bias))
    assert_close(beta, 1 / (1 + np.exp(-b)), ULPS)
    assert_close(g, -np.exp(A_log) * np.log(1 + np.exp(a + dt_bias)), 1e-6)
    assert (g < 0).all()


@pytest.mark.parametrize("bias", [89.0, 200.0])
def test_saturated_softplus_decays_and_does_not_wipe(bias: float) -> None:
    """a + dt_bias of 89 and more: exp overflows in float32, softplus is x."""
    a, b = jnp.zeros((1, CFG.d_model)), jnp.full((CFG.num_v_heads,), bias)
    params = gdn.GDNParams(**{**vars(PARAMS), "dt_bias": b, "A_log": jnp.full_like(b, -6.0)})
    g = jax.jit(steps.input_projections)(params, a)[5]
    assert_close(g, np.full(g.shape, -np.exp(-6.0) * bias), ULPS)


def test_softplus_has_three_branches() -> None:
    # The subnormal result at -89 may be flushed to zero.
    x = np.array([-500, -89, -20.5, -20, -5, -1e-3, 0, 1, 5, 20, 20.5, 89, 1e4], np.float32)
    y, slope = jax.jit(jax.vmap(jax.value_and_grad(softplus)))(jnp.asarray(x))
    np.testing.assert_allclose(y, np.logaddexp(0.0, x.astype(np.float64)), rtol=3e-7, atol=1e-37)
    np.testing.assert_array_equal(y[-3:], x[-3:])
    np.testing.assert_allclose(slope, oracle.sigmoid(x.astype(np.float64)), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("W", [2, 3, 4])
def test_convolution_reads_oldest_first_and_stores_its_input(W: int) -> None:
    qkv, hist, weight = draw(2, 12), draw(2, W - 1, 12, seed=1), draw(12, W, seed=2)
    out, new = jax.jit(steps.causal_conv)(*map(jnp.asarray, (qkv, hist, weight)))
    acc = weight[:, W - 1] * qkv.astype(np.float64)
    for j in range(W - 1):
        acc += weight[:, j].astype(np.float64) * hist[:, j]
    assert_close(out, acc / (1 + np.exp(-acc)), ULPS)
    np.testing.assert_array_equal(new[:, -1], qkv)
    np.testing.assert_array_equal(new[:, :-1], hist[:, 1:])


def test_split_is_q_then_k_then_v() -> None:
    q, k, v = steps.split_heads(jnp.arange(CFG.conv_dim, dtype=jnp.float32), CFG)
    HK, K, HV, V = CFG.num_k_heads, CFG.head_k_dim, CFG.num_v_heads, CFG.head_v_dim
    np.testing.assert_array_equal(q, np.arange(HK * K).reshape(HK, K))
    np.testing.assert_array_equal(k, HK * K + np.arange(HK * K).reshape(HK, K))
    np.testing.assert_array_equal(v, 2 * HK * K + np.arange(HV * V).reshape(HV, V))


def test_l2_norm_has_its_epsilon_under_the_root_of_a_sum() -> None:
    """A vector of norm 1e-3 comes out with norm sqrt(1/2); a mean form would give 0.97."""
    x = np.zeros((2, 16), np.float32)
    x[0] = 1e-3 / 4
    y = np.asarray(jax.jit(steps.l2_normalise)(jnp.asarray(x)))
    assert abs(np.linalg.norm(y[0]) - 0.5**0.5) < 1e-6
    np.testing.assert_array_equal(y[1], 0.0)


def test_l2_norm_has_a_finite_gradient_at_a_zero_row() -> None:
    """y = x/1e-3 there, so the gradient of a sum is 1000."""
    grad = jax.jit(jax.grad(lambda x: jnp.sum(steps.l2_normalise(x))))(jnp.zeros((2, 16)))
    np.testing.assert_allclose(grad, 1000.0, rtol=1e-5)


def test_q_is_scaled_once_and_k_is_not() -> None:
    q, k = jax.jit(steps.normalise_qk)(
        jnp.asarray(draw(3, 2, 64)), jnp.asarray(draw(3, 2, 64, seed=1))
    )
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), 64**-0.5, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(k, axis=-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize(("HK", "HV"), [(2, 2), (2, 4), (2, 6), (1, 3)])
def test_delta_rule_of_one_token(HK: int, HV: int) -> None:
    """Per value head, with key head h // (HV/HK), read from the updated state."""
    K, V = 8, 5
    q, k, v = draw(HK, K), draw(HK, K, seed=1), draw(HV, V, seed=2)
    g, beta, S0 = -np.abs(draw(HV, seed=3)), np.abs(draw(HV, seed=4)) / 4, draw(HV, K, V, seed=5)
    o, S = jax.jit(steps.delta_rule)(*map(jnp.asarray, (q, k, v, g, beta, S0)))
    for h in range(HV):
        kh, qh = (x[h // (HV // HK)].astype(np.float64) for x in (k, q))
        decayed = np.exp(np.float64(g[h])) * S0[h]
        new = decayed + np.outer(kh, (v[h] - kh @ decayed) * beta[h])
        assert_close(S[h], new, 1e-6, f"S of head {h}")
        assert_close(o[h], qh @ new, 1e-6, f"o of head {h}")


def test_gated_norm_uses_the_weight_as_it_is() -> None:
    o, z, weight = draw(2, 4, 8), draw(2, 32, seed=1), draw(8, seed=2)
    out = gated_rms_norm(*map(jnp.asarray, (o, z, weight)), 1e-6)
    wide, gate = o.astype(np.float64), z.astype(np.float64).reshape(o.shape)
    rms = np.sqrt(np.square(wide).sum(-1, keepdims=True) / 8 + 1e-6)
    assert_close(out, weight * (wide / rms) * gate / (1 + np.exp(-gate)), 1e-6)
    nothing = gated_rms_norm(jnp.asarray(o), jnp.asarray(z), jnp.zeros(8), 1e-6)
    np.testing.assert_array_equal(nothing, 0.0)


def test_gated_norm_epsilon_is_added_to_the_mean() -> None:
    o, one = jnp.full((1, 4), 1e-3), jnp.ones(4)
    out = gated_rms_norm(o, one, one, 1e-6)
    np.testing.assert_allclose(out, 0.5**0.5 / (1 + np.exp(-1.0)), rtol=1e-5)


def test_output_projection_flattens_heads_in_order() -> None:
    o, w = draw(2, 6, 16), draw(40, 96, seed=1)
    expected = o.astype(np.float64).reshape(2, 96) @ w.T.astype(np.float64)
    assert_close(steps.output_projection(jnp.asarray(o), jnp.asarray(w)), expected, 1e-6)


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_project_by_few_and_by_many_rows(rows: int) -> None:
    """Nine rows take the dot; both forms are the same product."""
    x, w = draw(rows, 192), draw(40, 192, seed=1)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    assert_close(project(jnp.asarray(x), jnp.asarray(w)), expected, 1e-6)
    assert_close(project(jnp.asarray(x[:, None]), jnp.asarray(w))[:, 0], expected, 1e-6)


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_project_widens_weights_exactly(rows: int, dtype) -> None:
    x, w = jnp.asarray(draw(rows, 64)), jnp.asarray(draw(24, 64, seed=1)).astype(dtype)
    y = project(x, w)
    assert y.dtype == jnp.float32
    assert_same_bits(y, project(x, w.astype(jnp.float32)))


def test_every_step_names_itself_in_the_program() -> None:
    state, x = gdn.init_state(CFG), X[:1]
    lowered = jax.jit(gdn.decode_step, static_argnames="cfg").lower(PARAMS, state, x, CFG)
    text = lowered.as_text(debug_info=True)
    names = "input_projections causal_conv split_heads normalise_qk delta_rule gated_rms_norm"
    for name in [*names.split(), "output_projection"]:
        assert f"{name}/" in text, name
