"""The float64 oracle: NumPy, one token at a time, no jax; where results differ, it is right.

Written the way the layer's equations read, without regard to speed. Weights and states may have
any float dtype; they are widened to float64 before anything is computed.
"""

from collections.abc import Mapping

import numpy as np

from gdn_jax.config import GDNConfig

F64 = np.ndarray
QK_NORM_EPS = 1e-6


def wide(x: np.ndarray) -> F64:
    """Any float array in float64."""
    return np.asarray(x).astype(np.float64)


def sigmoid(x: F64) -> F64:
    """``1 / (1 + exp(-x))`` without overflow: the exponential never sees a positive argument."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def softplus(x: F64) -> F64:
    """``log(1 + exp(x))``."""
    return np.logaddexp(0.0, x)


def silu(x: F64) -> F64:
    """``x · sigmoid(x)``."""
    return x * sigmoid(x)


def l2_normalise(x: F64) -> F64:
    """``x / sqrt(sum(x²) + 1e-6)`` over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + QK_NORM_EPS)


def delta_rule(q: F64, k: F64, v: F64, g: F64, beta: F64, S: F64) -> tuple[F64, F64]:
    """One token of one sequence: q, k [HK, K], v [HV, V], g, beta [HV], S [HV, K, V] -> o, S."""
    out, new = np.empty_like(v), np.empty_like(S)
    groups = v.shape[0] // k.shape[0]
    for h in range(v.shape[0]):
        kh, qh = k[h // groups], q[h // groups]
        Sh = np.exp(g[h]) * S[h]
        delta = (v[h] - Sh.T @ kh) * beta[h]
        new[h] = Sh + np.outer(kh, delta)
        out[h] = new[h].T @ qh
    return out, new


def recurrent_gated_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    *,
    scale: float | None = None,
    initial_state: np.ndarray | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[F64, F64]:
    """The operator of the same name in float64: q, k [B, T, HK, K], v [B, T, HV, V] -> o, S."""
    q, k, v, g, beta = (wide(x) for x in (q, k, v, g, beta))
    B, T, HV, V = v.shape
    K = k.shape[-1]
    if use_qk_l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    q = q * (K**-0.5 if scale is None else scale)
    S = np.zeros((B, HV, K, V)) if initial_state is None else wide(initial_state)
    o = np.empty((B, T, HV, V))
    for b in range(B):
        for t in range(T):
            o[b, t], S[b] = delta_rule(q[b, t], k[b, t], v[b, t], g[b, t], beta[b, t], S[b])
    return o, S


def step(weights: Mapping[str, F64], cfg: GDNConfig, S: F64, hist: F64, x: F64) -> dict[str, F64]:
    """The seven steps for one token of one sequence, all in float64: x [D] -> every trace entry."""
    w = weights
    xc, z = w["in_proj_qkv"] @ x, w["in_proj_z"] @ x
    b, a = w["in_proj_b"] @ x, w["in_proj_a"] @ x
    beta = sigmoid(b)
    g = -np.exp(w["A_log"]) * softplus(a + w["dt_bias"])

    window = np.concatenate([hist, xc[None]])
    xcv = silu(np.sum(window * w["conv_weight"].T, axis=0))

    q, k, v = np.split(xcv, [cfg.key_dim, 2 * cfg.key_dim])
    q = l2_normalise(q.reshape(cfg.num_k_heads, cfg.head_k_dim)) * cfg.head_k_dim**-0.5
    k = l2_normalise(k.reshape(cfg.num_k_heads, cfg.head_k_dim))
    on, S = delta_rule(q, k, v.reshape(cfg.num_v_heads, cfg.head_v_dim), g, beta, S)

    rms = np.sqrt(np.mean(on * on, axis=-1, keepdims=True) + cfg.norm_eps)
    onn = w["norm_weight"] * (on / rms) * silu(z.reshape(on.shape))
    out = w["out_proj"] @ onn.reshape(-1)
    return dict(XC=xc, Z=z, B=b, A=a, BETA=beta, G=g, XCV=xcv) | dict(
        Q=q, K=k, ON=on, ONN=onn, OUT=out, S=S, HIST=window[1:]
    )


def layer_trace(
    weights: Mapping[str, np.ndarray],
    cfg: GDNConfig,
    xs: np.ndarray,
    *,
    S: np.ndarray | None = None,
    conv_hist: np.ndarray | None = None,
) -> dict[str, F64]:
    """T tokens of one layer and one sequence in float64, with every operator's result.

    Args:
        weights: the fields of GDNParams by name, any float dtype.
        cfg: the layer's sizes.
        xs: [T, D].
        S, conv_hist: the state to start from, [HV, K, V] and [W-1, C]; zeros by default.

    Returns:
        Arrays [T, ..] under the names of :class:`gdn_jax.Trace`, S and HIST included.
    """
    weights = {name: wide(x) for name, x in weights.items()}
    state = np.zeros((cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim)) if S is None else wide(S)
    hist = np.zeros((cfg.conv_width - 1, cfg.conv_dim)) if conv_hist is None else wide(conv_hist)
    tokens = []
    for x in wide(xs):
        tokens.append(step(weights, cfg, state, hist, x))
        state, hist = tokens[-1]["S"], tokens[-1]["HIST"]
    return {name: np.stack([token[name] for token in tokens]) for name in tokens[0]}
