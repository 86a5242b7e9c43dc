"""The float64 oracle against closed forms worked out by hand."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest

import gdn_jax
from gdn_jax import GDNConfig, oracle
from gdn_jax.layer.trace import trace_shapes
from tests.support.cases import LAYER, layer_inputs

HK, HV, K, V = 2, 6, 5, 3
EXACT = 1e-14
"""A few ulp of float64 between two ways to write one formula."""


def draw(T: int, seed: int = 0):
    """One sequence of T tokens: q, k, v, g, beta [1, T, ..] and a state."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 1, T, HK, K))
    v = rng.standard_normal((1, T, HV, V))
    g, beta = -rng.uniform(0.1, 2.0, (1, T, HV)), rng.uniform(0.1, 0.9, (1, T, HV))
    return q, k, v, g, beta, rng.standard_normal((1, HV, K, V))


def close(a, b, limit: float = EXACT) -> None:
    np.testing.assert_allclose(a, b, rtol=limit, atol=limit)


def test_one_token_from_zero() -> None:
    """S = beta k⊗v and o = beta (q·k) v."""
    q, k, v, g, beta, _ = draw(1)
    o, S = oracle.recurrent_gated_delta_rule(q, k, v, g, beta, scale=0.5)
    for h in range(HV):
        qh, kh, vh = q[0, 0, h // 3], k[0, 0, h // 3], v[0, 0, h]
        close(S[0, h], beta[0, 0, h] * kh[:, None] * vh[None, :])
        close(o[0, 0, h], 0.5 * beta[0, 0, h] * math.fsum(qh * kh) * vh)


def test_two_tokens_from_zero() -> None:
    """S2 = c b1 k1⊗v1 + b2 k2⊗v2 - c b1 b2 (k1·k2) k2⊗v1, with c = exp(g2)."""
    q, k, v, g, beta, _ = draw(2)
    o, S = oracle.recurrent_gated_delta_rule(q, k, v, g, beta, scale=1.0)
    for h in range(HV):
        (k1, k2), q2, (v1, v2) = k[0, :, h // 3], q[0, 1, h // 3], v[0, :, h]
        (b1, b2), c = beta[0, :, h], math.exp(g[0, 1, h])
        k12, qk1, qk2 = math.fsum(k1 * k2), math.fsum(q2 * k1), math.fsum(q2 * k2)
        outer = c * b1 * np.multiply.outer(k1, v1) + b2 * np.multiply.outer(k2, v2)
        close(S[0, h], outer - c * b1 * b2 * k12 * np.multiply.outer(k2, v1))
        close(o[0, 1, h], c * b1 * qk1 * v1 + b2 * qk2 * v2 - c * b1 * b2 * k12 * qk2 * v1)


def test_matrix_form() -> None:
    """S ← exp(g)(I - beta kkᵀ)S + beta k⊗v, from a live state, with the default scale."""
    q, k, v, g, beta, S0 = draw(4)
    o, S = oracle.recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=S0)
    for h in range(HV):
        M = S0[0, h]
        for t in range(4):
            kt, b = k[0, t, h // 3][:, None], beta[0, t, h]
            M = math.exp(g[0, t, h]) * (np.eye(K) - b * kt @ kt.T) @ M + b * kt @ v[0, t, h][None]
            close(o[0, t, h], q[0, t, h // 3] @ M / math.sqrt(K), 1e-12)
        close(S[0, h], M, 1e-12)


def test_beta_zero_only_decays() -> None:
    q, k, v, g, _, S0 = draw(3)
    _, S = oracle.recurrent_gated_delta_rule(q, k, v, g, np.zeros((1, 3, HV)), initial_state=S0)
    close(S, np.exp(g.sum(axis=1))[..., None, None] * S0)


@pytest.mark.parametrize("g", [-np.inf, -1e5])
def test_decay_zero_forgets_everything(g: float) -> None:
    q, k, v, _, beta, S0 = draw(1)
    gates = np.full((1, 1, HV), g)
    forgotten = oracle.recurrent_gated_delta_rule(q, k, v, gates, beta, initial_state=S0)
    fresh = oracle.recurrent_gated_delta_rule(q, k, v, gates, beta)
    for a, b in zip(forgotten, fresh, strict=True):
        np.testing.assert_array_equal(a, b)


def test_decay_one_recalls_orthogonal_keys_and_overwrites_a_repeated_one() -> None:
    """With g = 0 and beta = 1 the state is a table: Sᵀk_i = v_i, the last value written."""
    keys = np.eye(K)[[0, 1, 2, 3, 4, 2]]
    v = np.random.default_rng(1).standard_normal((1, 6, HV, V))
    k = np.broadcast_to(keys[None, :, None], (1, 6, HK, K))
    ones = np.ones((1, 6, HV))
    o, S = oracle.recurrent_gated_delta_rule(k, k, v, 0 * ones, ones, scale=1.0)
    close(o, v)
    for slot, token in enumerate([0, 1, 5, 3, 4]):
        close(S[0, :, slot], v[0, token])


def test_zero_key_writes_nothing() -> None:
    q, k, v, g, beta, S0 = draw(1)
    for l2norm in (False, True):
        o, S = oracle.recurrent_gated_delta_rule(
            q, 0 * k, v, g, beta, initial_state=S0, scale=1.0, use_qk_l2norm=l2norm
        )
        assert np.isfinite(o).all()
        close(S, np.exp(g[:, 0])[..., None, None] * S0)


def test_elementary_functions_at_the_ends() -> None:
    x = np.array([-1e4, -30.0, 0.0, 30.0, 1e4])
    e = math.exp(-30)
    close(oracle.sigmoid(x), [0.0, e / (1 + e), 0.5, 1 / (1 + e), 1.0])
    close(oracle.softplus(x), [0.0, math.log1p(e), math.log(2), 30.0 + math.log1p(e), 1e4])
    close(oracle.silu(x)[2:], [0.0, 30.0 / (1 + e), 1e4])


def test_layer_of_scalars() -> None:
    """Every size 1: the seven steps of three tokens in plain arithmetic, from a live state."""
    cfg = GDNConfig(1, 1, 1, 1, 1, conv_width=2, norm_eps=1e-3)
    wq, wk, wv, wz, wb, wa, A_log, dt, wn, wo = 0.7, -1.3, 0.9, 1.1, 0.4, -0.6, 0.2, -0.5, 1.7, -0.8
    taps = ((0.3, 0.9), (-0.2, 0.7), (0.5, -1.1))
    S, hist, xs = 0.25, (0.1, -0.4, 0.6), (1.2, -0.7, 0.3)
    column = {"in_proj_z": wz, "in_proj_b": wb, "in_proj_a": wa, "out_proj": wo}
    weights = {name: np.array([[w]]) for name, w in column.items()} | dict(
        in_proj_qkv=np.array([[wq], [wk], [wv]]),
        conv_weight=np.array(taps),
        A_log=np.array([A_log]),
        dt_bias=np.array([dt]),
        norm_weight=np.array([wn]),
    )
    start = dict(S=np.array([[[S]]]), conv_hist=np.array([hist]))
    trace = oracle.layer_trace(weights, cfg, np.array(xs)[:, None], **start)

    def silu(x: float) -> float:
        return x / (1 + math.exp(-x))

    for t, x in enumerate(xs):
        beta = 1 / (1 + math.exp(-wb * x))
        g = -math.exp(A_log) * math.log(1 + math.exp(wa * x + dt))
        raw = (wq * x, wk * x, wv * x)
        c = [silu(w[0] * h + w[1] * r) for w, h, r in zip(taps, hist, raw, strict=True)]
        hist = raw
        q, k = (n / math.sqrt(n * n + 1e-6) for n in c[:2])
        S = math.exp(g) * S
        S = S + k * (c[2] - S * k) * beta
        o = S * q
        y = wo * wn * o / math.sqrt(o * o + 1e-3) * silu(wz * x)
        for name, value in dict(BETA=beta, G=g, XCV=c, Q=q, K=k, S=S, ON=o, OUT=y).items():
            close(trace[name][t].ravel(), np.ravel(value), 1e-13)
        close(trace["HIST"][t, 0], raw)


def test_layer_reads_back_every_entry_in_its_shape() -> None:
    case = LAYER["tiny_wide"]
    weights, xs, _ = layer_inputs(case)
    trace = oracle.layer_trace(weights, case.cfg, xs[0])
    shapes = {name: x.shape[1:] for name, x in trace.items()}
    assert shapes == trace_shapes(case.cfg)
    assert all(x.dtype == np.float64 for x in trace.values())


def test_imports_no_jax() -> None:
    """Nor do the modules it imports by name."""
    folder = Path(gdn_jax.__file__).parent
    seen, waiting = set(), {"oracle"}
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for node in ast.walk(ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] not in ("jax", "jaxlib", "chex"), f"{module}: {name}"
                if name.startswith("gdn_jax.") and name.count(".") == 1:
                    waiting |= {name.split(".")[1]} - seen
    assert "oracle" in seen
