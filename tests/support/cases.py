"""The one table of cases: shapes, lengths and kinds of numbers that every backend must get right.

Numbers are drawn by NumPy from the seed of the case. Sizes follow :mod:`gdn_jax.types`.
"""

import dataclasses
import math

import numpy as np

from gdn_jax import PRESETS, GDNConfig
from gdn_jax.verify.draw import draw_inputs, draw_weights

Arrays = dict[str, np.ndarray]

TILES = (32, 64, 128)
"""Columns of S that a CTA may own."""

STRONG = math.log(1e-12)
"""A log decay that wipes the state with every token: exp(-cumsum) overflows after 26 of them."""


@dataclasses.dataclass(frozen=True)
class OpCase:
    """One workload of the gated delta rule.

    decay
        "none": g is 0. "half": 0 on every second token, drawn on the others.
        "trained": log-uniform in [-1.6, -1e-5]. "strong": 1e-12 a token.
        "cliff": -90 at the first token, then weak. "weak": uniform in [-0.034, -0.012].
        A number: that log decay everywhere.
    keys
        "random": normal. "unit": one unit key for all tokens.
        "correlated": unit keys and queries with q·k near 0.9. "some_zero": every third key is 0.
    beta
        None: uniform in (0, 1). A number: that value everywhere.
    live
        Whether the pass starts from a drawn state instead of zeros.
    l2norm
        Whether the operator normalises q and k itself. The drawn ones have unit length otherwise:
        the rule is stable only for keys of at most that length.
    """

    B: int
    T: int
    HK: int
    HV: int
    K: int
    V: int
    decay: str | float = "trained"
    keys: str = "random"
    beta: float | None = None
    live: bool = False
    l2norm: bool = False
    seed: int = 0


OPERATOR: dict[str, OpCase] = {
    "one_token": OpCase(2, 1, 2, 4, 16, 8, live=True),
    "no_decay_hv_equals_hk": OpCase(1, 65, 3, 3, 16, 8, "none", live=True),
    "half_decay_hv_twice_hk": OpCase(2, 63, 2, 4, 16, 8, "half"),
    "hv_thrice_hk": OpCase(1, 130, 2, 6, 8, 16, live=True, l2norm=True),
    "k64_v128": OpCase(1, 37, 1, 2, 64, 128, live=True),
    "strong_decay": OpCase(1, 64, 2, 4, 16, 8, "strong", live=True),
    "cliff": OpCase(1, 64, 2, 4, 16, 8, "cliff", live=True),
    "repeated_key": OpCase(1, 64, 1, 1, 16, 8, -1e-3, keys="unit", beta=0.835),
    "correlated": OpCase(1, 512, 1, 2, 32, 16, "weak", keys="correlated", beta=1.0),
    "zero_keys": OpCase(1, 20, 2, 4, 16, 8, keys="some_zero", live=True, l2norm=True),
    "beta_zero": OpCase(1, 20, 2, 4, 16, 8, beta=0.0, live=True),
    "beta_one": OpCase(1, 20, 2, 4, 16, 8, beta=1.0, live=True),
}


def operator_inputs(case: OpCase) -> tuple[Arrays, np.ndarray | None]:
    """Float32 ``q, k, v, g, beta`` by name, and the initial state or None."""
    rng = np.random.default_rng(case.seed)
    B, T, HV = case.B, case.T, case.HV
    v = rng.standard_normal((B, T, HV, case.V))
    beta = rng.uniform(0.02, 0.98, (B, T, HV))
    if case.beta is not None:
        beta = np.full_like(beta, case.beta)
    k = _keys(case, rng)
    if case.keys == "correlated":
        q = 0.9 * k + math.sqrt(1 - 0.81) * _unit(rng.standard_normal(k.shape))
    else:
        q = rng.standard_normal(k.shape) if case.l2norm else _unit(rng.standard_normal(k.shape))
    state = rng.standard_normal((B, HV, case.K, case.V)) if case.live else None
    arrays = dict(q=q, k=k, v=v, g=_log_decay(case, rng), beta=beta)
    single = {name: x.astype(np.float32) for name, x in arrays.items()}
    return single, None if state is None else state.astype(np.float32)


def _keys(case: OpCase, rng: np.random.Generator) -> np.ndarray:
    k = rng.standard_normal((case.B, case.T, case.HK, case.K))
    if case.keys == "unit":
        return _unit(np.broadcast_to(k[:, :1], k.shape))
    if case.keys == "some_zero":
        k[:, ::3] = 0.0
    return k if case.l2norm else _unit(k)


def _log_decay(case: OpCase, rng: np.random.Generator) -> np.ndarray:
    shape = (case.B, case.T, case.HV)
    drawn = -np.exp(rng.uniform(math.log(1e-5), math.log(1.6), shape))
    if case.decay == "half":
        drawn[:, ::2] = 0.0
    elif case.decay == "cliff":
        drawn[:, 0], drawn[:, 1:] = -90.0, drawn[:, 1:] * 0.1
    elif case.decay == "weak":
        drawn = rng.uniform(-0.034, -0.012, shape)
    elif case.decay != "trained":
        drawn = np.full(shape, {"none": 0.0, "strong": STRONG}.get(str(case.decay), case.decay))
    return drawn


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One layer, its input and the state it starts from.

    decay: "trained" as drawn; "none" with ``exp(A_log)`` of 1e-30; "strong" with ``exp(A_log)`` of
    16 and dt_bias of 2; "saturated" with ``a + dt_bias`` above 89 and ``exp(A_log)`` of 0.01, where
    softplus is x and the decay about exp(-1).
    """

    cfg: GDNConfig
    B: int
    T: int
    decay: str = "trained"
    live: bool = False
    seed: int = 0


LAYER: dict[str, LayerCase] = {
    "tiny": LayerCase(PRESETS["tiny"], 2, 5, live=True),
    "tiny_wide": LayerCase(PRESETS["tiny-wide"], 1, 5, seed=1),
    "hv_equals_hk_w2": LayerCase(GDNConfig(64, 3, 3, 16, 8, conv_width=2), 1, 3, live=True),
    "k64_v128_w3": LayerCase(GDNConfig(80, 1, 2, 64, 128, conv_width=3), 1, 4, live=True),
    "one_token": LayerCase(PRESETS["tiny"], 2, 1),
    "no_decay": LayerCase(PRESETS["tiny"], 2, 5, "none", live=True),
    "strong_decay": LayerCase(PRESETS["tiny"], 2, 5, "strong", live=True),
    "saturated_softplus": LayerCase(PRESETS["tiny"], 2, 5, "saturated", live=True),
    "nine_rows": LayerCase(PRESETS["tiny"], 9, 2, live=True),
}


def layer_inputs(case: LayerCase) -> tuple[Arrays, np.ndarray, Arrays]:
    """Weights by field name, xs [B, T, D], and the state ``S, conv_hist`` with its batch axis."""
    cfg, seed = case.cfg, case.seed
    weights = draw_weights(cfg, seed)
    if case.decay != "trained":
        log_a, bias = {"none": (-69.0, 0.0), "strong": (2.77, 2.0), "saturated": (-4.6, 100.0)}[
            case.decay
        ]
        weights["A_log"] = np.full_like(weights["A_log"], log_a)
        weights["dt_bias"] = np.full_like(weights["dt_bias"], bias)
    xs = draw_inputs(cfg, case.B * case.T, seed).reshape(case.B, case.T, cfg.d_model)
    return weights, xs, state_arrays(cfg, (case.B,), seed, live=case.live)


def state_arrays(cfg: GDNConfig, lead: tuple[int, ...], seed: int, *, live: bool = True) -> Arrays:
    """A drawn state (zeros unless ``live``) with the leading axes ``lead``, float32."""
    rng = np.random.default_rng(seed + 1000)
    S = (*lead, cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim)
    hist = (*lead, cfg.conv_width - 1, cfg.conv_dim)
    arrays = dict(S=rng.standard_normal(S), conv_hist=rng.standard_normal(hist))
    return {name: (x * live).astype(np.float32) for name, x in arrays.items()}
