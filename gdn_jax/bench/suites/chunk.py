"""The chunked delta rule over many tokens; every output is checked."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax import oracle
from gdn_jax._core.backend import select_backend
from gdn_jax.bench.workload import Prepared, Workload, on_gpu, peak_bytes, poisoned
from gdn_jax.config import GDNConfig
from gdn_jax.ops.chunk import chunk_gated_delta_rule
from gdn_jax.report.metrics import distance

Rule = Callable[..., tuple[jax.Array, jax.Array]]
"""q, k, v, g, beta, S -> o, S."""

CHUNK = 64
LIMIT, LIMIT_F32 = 2e-2, 1e-5
"""Limits of max_rel to float64: of bfloat16 operands and products, and of float32 ones."""
PERIOD = 4099
"""How many tokens of q, k and v are drawn, then repeated: a prime, so chunks begin differently."""
ANCHOR, ANCHORED = 64, 1e-6
"""How many tokens NumPy computes as well, and the distance allowed to its results."""
FEW = 4096
"""The fewest tokens of a program, so that the device takes longer than the host."""


class Operands(NamedTuple):
    """q, k [1, T, HK, K], v [1, T, HV, V], g and beta [1, T, HV], S [N, HV, K, V]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    S: jax.Array


class Case(NamedTuple):
    """What is computed: T tokens in all, of ``sequences`` sequences one after another."""

    cfg: GDNConfig
    tokens: int
    dtype: str = "bfloat16"
    sequences: int = 1


def workload(case: Case, backend: str) -> Workload:
    """:func:`gdn_jax.chunk_gated_delta_rule` with the final state."""
    kernel = "chunk_packed" if case.sequences > 1 else "chunk"
    kernel += "_f32" * (case.dtype == "float32")
    return row_of(case, kernel, backend, functools.partial(_make, case, backend))


def row_of(case: Case, kernel: str, backend: str, make: Callable[[], Prepared]) -> Workload:
    """A row whose bytes and flops are those of the chunked form, whoever computes it."""
    cfg, T, links = case.cfg, case.tokens, rounds(case)
    shape = f"{cfg.num_v_heads}x{cfg.head_k_dim}x{cfg.head_v_dim}_t{T}"
    limit = LIMIT_F32 if case.dtype == "float32" else LIMIT
    moved, flops = bytes_of(case), flops_of(cfg, T)
    sizes = (shape, 1, moved, flops, links)
    return Workload(kernel, backend, *sizes, make, limit, matrix=True)


def flops_of(cfg: GDNConfig, tokens: int) -> int:
    """Flops of the rule over chunks of 64; an operand in several bfloat16 parts counts once.

    Of each token and key head: k·kᵀ and q·kᵀ. Of each token and value head: the inverse of the
    triangle, its product with what is written, the product of the scores with that, and S·k, S·q
    and k·deltaᵀ.
    """
    K, V = cfg.head_k_dim, cfg.head_v_dim
    key_head = 2 * 2 * CHUNK * K
    value_head = CHUNK**2 / 3 + 2 * 2 * CHUNK * V + 3 * 2 * K * V
    return int(tokens * (cfg.num_k_heads * key_head + cfg.num_v_heads * value_head))


def bytes_of(case: Case) -> int:
    """Bytes: q, k and v read and o written in their dtype; gates read; states read and written."""
    cfg, T = case.cfg, case.tokens
    state = cfg.num_v_heads * cfg.head_k_dim * cfg.head_v_dim
    moved = jnp.dtype(case.dtype).itemsize * T * 2 * (cfg.key_dim + cfg.value_dim)
    return moved + 8 * T * cfg.num_v_heads + 8 * case.sequences * state


def rounds(case: Case) -> int:
    """How many calls of the rule a program makes."""
    return max(1, min(FEW // case.tokens, 16)) if on_gpu() else 1


def prepare(case: Case, rule: Rule, detail: str, repeats: int = 1) -> Prepared:
    """Prepare ``rule`` on the case's operands, with each key head repeated ``repeats`` times."""
    *operands, S = made(case)
    if repeats > 1:
        operands[:2] = (jnp.repeat(x, repeats, axis=2) for x in operands[:2])
    chain = jax.jit(functools.partial(_chain, rule=rule, rounds=rounds(case)))
    program = chain.lower(operands, S).compile()
    found = poisoned(program, operands, S)
    o, after = found[0]

    def run(carry: list[tuple[jax.Array, jax.Array]]) -> list[tuple[jax.Array, jax.Array]]:
        return program(operands, carry[-1][1])

    detail += "to float64 on the device, every output and the state"
    return Prepared(lambda: error(case, o, after), run, found, detail, memory=peak_bytes(program))


def _make(case: Case, backend: str) -> Prepared:
    cfg = case.cfg
    select_backend("chunk_gated_delta_rule", backend=backend, K=cfg.head_k_dim, V=cfg.head_v_dim)
    packed: dict[str, Any] = {}
    if case.sequences > 1:
        packed["cu_seqlens"] = jnp.asarray(starts(case))

    def rule(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        *tokens, S = operands
        return chunk_gated_delta_rule(*tokens, initial_state=S, backend=backend, **packed)

    several = f"{case.sequences} sequences, " if case.sequences > 1 else ""
    return prepare(case, rule, several)


def starts(case: Case) -> np.ndarray:
    """Where each sequence begins, and where the last one ends."""
    return np.linspace(0, case.tokens, case.sequences + 1).astype(np.int32)


def _chain(
    operands: Sequence[jax.Array], S: jax.Array, rule: Rule, rounds: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Outputs and state of each of ``rounds`` calls; each begins with the last one's state."""
    found = []
    for _ in range(rounds):
        # XLA must take the operands for new ones, or it computes only once what needs no state.
        operands, S = lax.optimization_barrier((operands, S))
        found.append(rule(*operands, S))
        S = found[-1][1]
    return found


@functools.lru_cache(maxsize=1)
def drawn(cfg: GDNConfig) -> tuple[np.ndarray, ...]:
    """q, k, v float32 [PERIOD, ..], q and k of unit length."""
    generator = np.random.default_rng(0)
    q, k = generator.standard_normal((2, PERIOD, cfg.num_k_heads, cfg.head_k_dim), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = generator.standard_normal((PERIOD, cfg.num_v_heads, cfg.head_v_dim), np.float32)
    return q, k, v


def gates(cfg: GDNConfig, tokens: int) -> tuple[np.ndarray, ...]:
    """g and beta float32 [T, HV], not repeated; the first tokens are the same for every T."""
    decay, strength = (np.random.default_rng(seed) for seed in (1, 2))
    size = (tokens, cfg.num_v_heads)
    g = -np.exp(decay.uniform(np.log(1e-5), np.log(0.1), size))
    return g.astype(np.float32), strength.uniform(0.02, 0.98, size).astype(np.float32)


def states(cfg: GDNConfig, sequences: int) -> np.ndarray:
    """The initial S, float32, about as large as it is after such tokens."""
    size = (sequences, cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim)
    return 0.3 * np.random.default_rng(3).standard_normal(size, np.float32)


def made(case: Case) -> Operands:
    """The operands on the device; g, beta and S are float32."""
    cfg, T = case.cfg, case.tokens
    at = np.arange(T) % PERIOD
    q, k, v = (jnp.asarray(x, case.dtype)[at][None] for x in drawn(cfg))
    g, beta = (jnp.asarray(x)[None] for x in gates(cfg, T))
    return Operands(q, k, v, g, beta, jnp.asarray(states(cfg, case.sequences)))


def error(case: Case, o: jax.Array, S: jax.Array) -> float:
    """The larger of two errors: the outputs' :func:`worst_block` and the states' max_rel."""
    exact_o, exact_S = exact(case)
    worst = [float(worst_block(o[0], exact_o[0]))]
    worst += [distance(np.asarray(S), np.asarray(exact_S)).max_rel]
    return float(np.max(worst))


@jax.jit
def worst_block(found: jax.Array, exact: jax.Array) -> jax.Array:
    """The worst max_rel of any 64 tokens, each by their own largest value; NaN if any is NaN."""

    def largest(x: jax.Array) -> jax.Array:
        x = jnp.max(jnp.abs(x).reshape(len(x), -1), axis=1)
        return jnp.max(jnp.pad(x, (0, -len(x) % CHUNK)).reshape(-1, CHUNK), axis=1)

    return jnp.max(largest(found.astype(jnp.float32) - exact) / largest(exact))


@functools.lru_cache(maxsize=8)
def exact(case: Case) -> tuple[jax.Array, jax.Array]:
    """Outputs and states computed token by token in float64 on the device, rounded to float32.

    NaN if NumPy's float64 disagrees about the outputs of the first tokens.
    """
    *tokens, S = made(case)
    n = case.sequences
    rows = [x.reshape(n, -1, *x.shape[2:]) for x in tokens]
    with jax.enable_x64(True):
        o, after = _token_by_token(rows, S)
    few = (np.asarray(x[:1, :ANCHOR]) for x in rows)
    anchor, _ = oracle.recurrent_gated_delta_rule(*few, initial_state=np.asarray(S[:1]))
    apart = distance(np.asarray(o[:1, :ANCHOR]), anchor).max_rel
    o = o.reshape(1, -1, *o.shape[2:])
    return (o, after) if apart <= ANCHORED else (o * math.nan, after)


@jax.jit
def _token_by_token(rows: Sequence[jax.Array], S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The recurrence of rows [B, T, ..], written as in its equations."""
    groups = rows[2].shape[2] // rows[0].shape[2]
    scale = rows[0].shape[-1] ** -0.5

    def token(S: jax.Array, xs: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = (x.astype(jnp.float64) for x in xs)
        q, k = (jnp.repeat(x, groups, axis=1)[..., None] for x in (q, k))
        S = jnp.exp(g)[..., None, None] * S
        delta = beta[..., None] * (v - jnp.sum(S * k, axis=2))
        S = S + k * delta[:, :, None]
        return S, (scale * jnp.sum(S * q, axis=2)).astype(jnp.float32)

    S, o = lax.scan(token, S.astype(jnp.float64), [jnp.swapaxes(x, 0, 1) for x in rows])
    return jnp.swapaxes(o, 0, 1), S.astype(jnp.float32)
