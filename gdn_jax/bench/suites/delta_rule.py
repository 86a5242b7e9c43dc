"""The delta rule of one token by itself; its states are updated in place."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax.bench.workload import (
    LIMIT,
    Prepared,
    Workload,
    links_for,
    poisoned,
    rounds_for,
    walked,
)
from gdn_jax.config import GDNConfig
from gdn_jax.ops.delta_rule import recurrent_gated_delta_rule
from gdn_jax.report.metrics import distance

LAYERS = 48


def draw(cfg: GDNConfig, batch: int) -> tuple[np.ndarray, ...]:
    """q, k, v, g, beta and S of one token, float32, q and k of unit length."""
    generator = np.random.default_rng(batch)
    HK, HV, K, V = cfg.num_k_heads, cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim
    q, k = generator.normal(size=(2, batch, 1, HK, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = generator.normal(size=(batch, 1, HV, V))
    g = -np.exp(generator.uniform(np.log(1e-5), np.log(0.1), (batch, 1, HV)))
    beta = generator.uniform(0.02, 0.98, (batch, 1, HV))
    S = generator.normal(size=(batch, HV, K, V))
    return tuple(x.astype(np.float32) for x in (q, k, v, g, beta, S))


def error(drawn: Sequence[np.ndarray], o: np.ndarray, S: np.ndarray) -> float:
    """The larger of the two max_rel to float64: of o and of the new state."""
    *operands, before = drawn
    exact_o, exact_S = oracle.recurrent_gated_delta_rule(*operands, initial_state=before)
    return max(distance(o, exact_o).max_rel, distance(S, exact_S).max_rel)


def sizes(cfg: GDNConfig, batch: int) -> tuple[str, int, int]:
    """Shape, bytes and flops: the state is read once and written once."""
    HV, K, V = cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim
    elements = batch * HV * K * V
    small = 4 * batch * (2 * cfg.key_dim + 2 * cfg.value_dim + 2 * HV)
    return f"{HV}x{K}x{V}", 8 * elements + small, 7 * elements


def workloads(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """:func:`gdn_jax.recurrent_gated_delta_rule`, T = 1, over the states of 48 layers."""
    for batch in batches:
        for backend in backends:
            yield _workload(cfg, batch, backend)


def _workload(cfg: GDNConfig, batch: int, backend: str) -> Workload:
    shape, moved, flops = sizes(cfg, batch)
    layers = links_for(moved, LAYERS)
    rounds = rounds_for(moved, layers)

    @jax.jit
    def one(operands, v, S):
        q, k, g, beta = operands
        return recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=S, backend=backend)

    def chain(carry, operands, rounds):
        def walk(carry):
            states, v = carry
            after = []
            for S in states:
                # The output is the next v, so the compiler cannot merge the calls.
                v, S = one(operands, v, S)
                after.append(S)
            return after, v

        return walked(walk, carry, rounds)

    def make() -> Prepared:
        drawn = draw(cfg, batch)
        q, k, v, g, beta, S = map(jnp.asarray, drawn)
        operands = (q, k, g, beta)
        queued = jax.jit(chain, static_argnames="rounds", donate_argnums=0)
        o = np.asarray(poisoned(one, operands, v, S)[0])
        # The state from the chain, which updates it in place; `one` alone may not.
        once = functools.partial(queued, rounds=1)
        first = np.asarray(poisoned(once, ([S + 0.0, S + 1.0], v + 0.0), operands)[0][0])
        carry = ([S + jnp.float32(layer) for layer in range(layers)], v + 0.0)
        return Prepared(
            lambda: error(drawn, o, first), lambda c: queued(c, operands, rounds=rounds), carry
        )

    links = layers * rounds
    return Workload("delta", backend, shape, batch, moved, flops, links, make, LIMIT)
