"""The middle kernel: all between the two projections in one launch, states updated in place."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax._core.backend import select_backend
from gdn_jax.bench import kernels
from gdn_jax.bench.suites import delta_rule
from gdn_jax.bench.workload import Prepared, Workload, links_for, poisoned, rounds_for, walked
from gdn_jax.config import GDNConfig
from gdn_jax.report.metrics import distance, unequal

Carry = tuple[jax.Array, jax.Array, jax.Array]

SPLITS = 8
"""How many partial sums of each large projection this kernel adds up."""


def workloads(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """The middle kernel over the states of 48 layers; XLA has no counterpart to compare with."""
    for batch in batches if "pallas" in backends else ():
        shape, moved, flops = delta_rule.sizes(cfg, batch)
        moved += 4 * batch * (SPLITS * (cfg.conv_dim + cfg.value_dim) + 2 * cfg.conv_dim)
        links = links_for(moved, delta_rule.LAYERS)
        rounds = rounds_for(moved, links)
        make = functools.partial(_make, cfg, batch, links, rounds)
        yield Workload("middle", "pallas", shape, batch, moved, flops, links * rounds, make)


def draw(cfg: GDNConfig, batch: int) -> dict[str, np.ndarray]:
    """Partial sums, small weights and a state, float32."""
    generator = np.random.default_rng(batch)
    HV, V, C, W = cfg.num_v_heads, cfg.head_v_dim, cfg.conv_dim, cfg.conv_width
    shapes = {"qkv": (SPLITS, batch, C), "z": (SPLITS, batch, HV * V)}
    shapes |= {"b": (1, batch, HV), "a": (1, batch, HV), "conv": (C, W), "norm": (V,)}
    shapes |= {"S": (batch, HV, cfg.head_k_dim, V), "hist": (batch, W - 1, C)}
    drawn = {name: generator.normal(size=shape) for name, shape in shapes.items()}
    drawn["A_log"] = generator.uniform(-4.0, 2.7, HV)
    drawn["dt_bias"] = generator.uniform(-7.0, -2.0, HV)
    return {name: x.astype(np.float32) for name, x in drawn.items()}


def exact(cfg: GDNConfig, drawn: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Steps 2 to 6 in float64: ONN [B, HV·V], S, and the newest frame of the history."""
    w = {name: oracle.wide(x) for name, x in drawn.items()}
    xc, z, b, a = (w[name].sum(0) for name in ("qkv", "z", "b", "a"))
    beta = oracle.sigmoid(b)
    g = -np.exp(w["A_log"]) * oracle.softplus(a + w["dt_bias"])
    window = np.concatenate([w["hist"], xc[:, None]], axis=1)
    xcv = oracle.silu(np.sum(window * w["conv"].T, axis=1))
    rows = []
    for r, channels in enumerate(xcv):
        q, k, v = np.split(channels, [cfg.key_dim, 2 * cfg.key_dim])
        q, k = (oracle.l2_normalise(x.reshape(-1, cfg.head_k_dim)) for x in (q, k))
        q = q * cfg.head_k_dim**-0.5
        v = v.reshape(-1, cfg.head_v_dim)
        rows.append(oracle.delta_rule(q, k, v, g[r], beta[r], w["S"][r]))
    on = np.stack([o for o, _ in rows])
    rms = np.sqrt(np.mean(on * on, axis=-1, keepdims=True) + cfg.norm_eps)
    onn = w["norm"] * (on / rms) * oracle.silu(z.reshape(on.shape))
    return {"onn": onn.reshape(len(on), -1), "S": np.stack([S for _, S in rows]), "frame": xc}


def _make(cfg: GDNConfig, batch: int, layers: int, rounds: int) -> Prepared:
    select_backend("decode_step", cfg, backend="pallas")
    drawn = draw(cfg, batch)
    x = {name: jnp.asarray(value) for name, value in drawn.items()}
    inputs = kernels.middle_inputs(x)

    @functools.partial(jax.jit, donate_argnums=0)
    def second(states: list[jax.Array], inputs: Any) -> Carry:
        S, hist = states
        onn, S, hist = kernels.middle_step(cfg, inputs, S, hist, jnp.ones((1,), jnp.int32))
        return S, hist, onn

    def stack(count: int) -> list[jax.Array]:
        return [jnp.broadcast_to(x[n], (count, *x[n].shape)) + 0.0 for n in ("S", "hist")]

    S, hist, onn = (np.asarray(y) for y in poisoned(second, stack(2), inputs))
    return Prepared(
        lambda: _error(cfg, drawn, S, hist, onn),
        lambda carry: _chain(carry, inputs, cfg=cfg, layers=layers, rounds=rounds),
        (*stack(layers), jnp.zeros(layers)),
    )


def _error(
    cfg: GDNConfig, drawn: dict[str, np.ndarray], S: np.ndarray, hist: np.ndarray, onn: np.ndarray
) -> float:
    """The worst max_rel of the second of two layers' results.

    Infinite if the first layer, or a frame of the history that must not change, has changed.
    """
    moved = unequal(S[0], drawn["S"]) + unequal(hist[0], drawn["hist"])
    moved += unequal(hist[1, :, :-1], drawn["hist"][:, :-1])
    right, found = exact(cfg, drawn), {"onn": onn, "S": S[1], "frame": hist[1, :, -1]}
    worst = max(distance(found[name], right[name]).max_rel for name in right)
    return math.inf if moved else worst


@functools.partial(jax.jit, static_argnames=("cfg", "layers", "rounds"), donate_argnums=0)
def _chain(carry: Carry, inputs: Any, cfg: GDNConfig, layers: int, rounds: int) -> Carry:
    """All layers of a stack, ``rounds`` times: the states, and an element of each output."""

    def walk(carry: Carry) -> Carry:
        S, hist, _ = carry
        kept = []
        for layer in range(layers):
            at = jnp.full((1,), layer, jnp.int32)
            onn, S, hist = _step(S, hist, at, inputs, cfg)
            kept.append(onn[0, 0])
        return S, hist, jnp.stack(kept)

    return walked(walk, carry, rounds)


@functools.partial(jax.jit, static_argnames="cfg")
def _step(S: jax.Array, hist: jax.Array, layer: jax.Array, inputs: Any, cfg: GDNConfig) -> Carry:
    return kernels.middle_step(cfg, inputs, S, hist, layer)
