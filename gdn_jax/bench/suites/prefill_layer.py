"""One int4 layer over many tokens in bfloat16, and each of its parts by itself."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax._core.backend import select_backend
from gdn_jax.bench.suites import chunk
from gdn_jax.bench.suites.layer import draw_params, draw_state, exact_weights, kernel_form, sizes
from gdn_jax.bench.workload import LIMIT, Prepared, Workload, peak_bytes, poisoned
from gdn_jax.config import GDNConfig
from gdn_jax.layer.compose import prefill
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState
from gdn_jax.layer.steps import causal_conv_tokens
from gdn_jax.quant.project import Rounded, project
from gdn_jax.report.metrics import distance, unequal

KERNEL, TIER = "prefill", "q4"
PARTS = ("projections", "convolution", "rule")
LAYER_LIMIT = 5e-2
"""Limit of max_rel for a layer with bfloat16 operands: its norm amplifies small outputs."""
ANCHOR, ANCHORED = 4, 1e-5
"""How many tokens NumPy computes in float64, and how far from them the float32 reference may be."""
_SPAN = 64
"""How many tokens at either end the convolution is checked at."""

_weights = functools.lru_cache(maxsize=1)(exact_weights)


def workloads(cfg: GDNConfig, tokens: int, backend: str) -> Iterator[Workload]:
    """A row of :func:`gdn_jax.prefill`, then one for each of its parts."""
    D, C, state = cfg.d_model, cfg.conv_dim, cfg.num_v_heads * cfg.head_k_dim * cfg.head_v_dim
    _, one, flops = sizes(cfg, TIER, 1)
    history = (cfg.conv_width - 1) * C
    weights = one - 8 * (state + history + D)
    products = tokens * (flops - 7 * state - 2 * C * cfg.conv_width)
    convolved = tokens * C * (2 * cfg.conv_width + 4)
    rule = chunk.Case(cfg, tokens)
    widths = 2 * D + 2 * cfg.value_dim + C + 2 * cfg.num_v_heads

    def workload(
        kernel: str, moved: int, flops: int, make: Callable[..., Prepared], limit: float
    ) -> Workload:
        made = functools.partial(make, cfg, tokens, backend)
        plain = Workload(kernel, backend, f"d{D}_t{tokens}", 1, moved, flops, 1, made, limit)
        return dataclasses.replace(plain, matrix=True)

    every = products + convolved + chunk.flops_of(cfg, tokens)
    whole = weights + 8 * (tokens * D + state + history)
    yield workload(KERNEL, whole, every, _make_layer, LAYER_LIMIT)
    moved = weights + 4 * tokens * widths
    yield workload(f"{KERNEL}_projections", moved, products, _make_projections, chunk.LIMIT)
    moved = 8 * (tokens * C + history) + 4 * C * cfg.conv_width
    yield workload(f"{KERNEL}_convolution", moved, convolved, _make_convolution, LIMIT)
    alone = chunk.workload(rule, backend)
    yield dataclasses.replace(alone, kernel=f"{KERNEL}_rule", shape=f"d{D}_t{tokens}")


def _start(
    cfg: GDNConfig, tokens: int, backend: str
) -> tuple[GDNParams, GDNParams, GDNState, jax.Array]:
    """Weights as drawn and in the backend's layout, a state, and inputs [1, T, D]."""
    select_backend(KERNEL, cfg, backend=backend)
    params = draw_params(cfg, TIER, jax.random.key(0))
    state, _ = draw_state(cfg, 1)
    xs = np.random.default_rng(1).standard_normal((1, tokens, cfg.d_model), np.float32)
    laid_out = kernel_form(params) if backend == "pallas" else params
    return params, laid_out, state, jnp.asarray(xs)


def _make_layer(cfg: GDNConfig, tokens: int, backend: str) -> Prepared:
    params, laid_out, state, xs = _start(cfg, tokens, backend)
    whole = jax.jit(prefill, static_argnames=("cfg", "precision", "backend"))
    options = {"cfg": cfg, "precision": "bfloat16", "backend": backend}
    program = whole.lower(laid_out, state, xs, **options).compile()
    found = poisoned(program, laid_out, state, xs)

    def check() -> float:
        wanted = whole(params, state, xs, cfg=cfg, precision="float32", backend="xla")
        return layer_error(cfg, xs, state, found, wanted)

    return Prepared(
        check,
        lambda carry: program(laid_out, carry[1], xs),
        found,
        f"to float32 on xla, whose first {ANCHOR} tokens are float64's",
        memory=peak_bytes(program),
    )


def layer_error(
    cfg: GDNConfig,
    xs: jax.Array,
    state: GDNState,
    found: tuple[jax.Array, GDNState],
    wanted: tuple[jax.Array, GDNState],
) -> float:
    """The worst max_rel of outputs, state and history to a reference.

    Infinite if the first outputs of that reference disagree with float64.
    """
    S, hist = (np.asarray(x[0]) for x in (state.S, state.conv_hist))
    few = np.asarray(xs[0, :ANCHOR])
    exact = oracle.layer_trace(_weights(cfg, TIER), cfg, few, S=S, conv_hist=hist)
    if not distance(np.asarray(wanted[0][0, :ANCHOR]), exact["OUT"]).max_rel <= ANCHORED:
        return math.inf
    worst = [float(chunk.worst_block(found[0][0], wanted[0][0]))]
    for mine, theirs in zip(*map(jax.tree.leaves, (found[1], wanted[1])), strict=True):
        worst.append(distance(np.asarray(mine), np.asarray(theirs)).max_rel)
    return float(np.max(worst))


def _make_projections(cfg: GDNConfig, tokens: int, backend: str) -> Prepared:
    _, params, _, xs = _start(cfg, tokens, backend)
    onn = jax.random.normal(jax.random.key(1), (1, tokens, cfg.value_dim))

    @jax.jit
    def projections(params: GDNParams, xs: jax.Array, onn: jax.Array) -> list[jax.Array]:
        pairs = [(xs, params.in_proj_b), (xs, params.in_proj_a)]
        large = ((xs, params.in_proj_qkv), (xs, params.in_proj_z), (onn, params.out_proj))
        return [project(x, w) for x, w in pairs] + [project(x, Rounded(w)) for x, w in large]

    program = projections.lower(params, xs, onn).compile()
    found = poisoned(program, params, xs, onn)
    some = np.unique(np.linspace(0, tokens - 1, 8).astype(int))

    def check() -> float:
        weights = _weights(cfg, TIER)
        x, o = (oracle.wide(np.asarray(a[0, some])) for a in (xs, onn))
        names = [f"in_proj_{name}" for name in ("b", "a", "qkv", "z")]
        wanted = [x @ weights[name].T for name in names] + [o @ weights["out_proj"].T]
        pairs = zip(found, wanted, strict=True)
        return float(np.max([distance(np.asarray(a[0, some]), b).max_rel for a, b in pairs]))

    detail = f"{len(some)} tokens from the first to the last to float64, every column"
    memory = peak_bytes(program)
    return Prepared(check, lambda _: program(params, xs, onn), None, detail, memory=memory)


def _make_convolution(cfg: GDNConfig, tokens: int, backend: str) -> Prepared:
    params, _, state, _ = _start(cfg, tokens, backend)
    qkv = jax.random.normal(jax.random.key(2), (1, tokens, cfg.conv_dim))

    @jax.jit
    def convolution(
        qkv: jax.Array, hist: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return causal_conv_tokens(qkv, hist, weight, None)

    given = (qkv, state.conv_hist, params.conv_weight)
    program = convolution.lower(*given).compile()
    out, after = poisoned(program, *given)
    detail = f"{_SPAN} tokens at either end to float64, the history's bits"

    def check() -> float:
        if unequal(np.asarray(after[0]), np.asarray(qkv[0, tokens - len(after[0]) :])):
            return math.inf
        frames = oracle.wide(np.concatenate([np.asarray(x[0]) for x in (state.conv_hist, qkv)]))
        taps = oracle.wide(np.asarray(params.conv_weight)).T
        worst = []
        for begin in (0, max(0, tokens - _SPAN)):
            n = min(_SPAN, tokens)
            shifted = (frames[begin + j : begin + j + n] * tap for j, tap in enumerate(taps))
            wanted = oracle.silu(np.sum(list(shifted), axis=0))
            worst.append(distance(np.asarray(out[0, begin : begin + n]), wanted).max_rel)
        return float(np.max(worst))

    return Prepared(check, lambda _: program(*given), None, detail, memory=peak_bytes(program))
