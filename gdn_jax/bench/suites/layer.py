"""Whole layers: a chain of them, and the stack of a model in one jit or in a few."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax._core.backend import select_backend
from gdn_jax.bench.slope import blocking
from gdn_jax.bench.suites import products
from gdn_jax.bench.workload import (
    Prepared,
    Workload,
    links_for,
    on_gpu,
    poisoned,
    rounds_for,
    walked,
)
from gdn_jax.config import GDNConfig
from gdn_jax.layer.compose import decode_step
from gdn_jax.layer.params import LARGE, GDNParams, init_params, param_dims
from gdn_jax.layer.state import GDNState
from gdn_jax.quant.kernel_layout import to_kernel
from gdn_jax.quant.q4array import Q4Array
from gdn_jax.report.metrics import distance
from gdn_jax.serving.bank import LayerBank

Carry = tuple[GDNState, jax.Array]

TIERS = ("f32", "bf16", "q4")
STACK = 48
GROUPS, GROUPED_BATCHES = (12, 6, 4), (1, 8)
"""Rows that divide the stack and wait for each call: how many layers a jit has, and the batches."""
DISTINCT = 7
"""How many sequences a batch repeats: coprime to any tile of rows, and cheap in float64."""
_SMALL = ("in_proj_b", "in_proj_a", "conv_weight")
_WIRED = 1e-3
"""Limit of max_rel between two programs of a stack: rounding grows a little, mistakes are O(1)."""
_BITS = {"f32": 32, "bf16": 16, "q4": 4.5}

_init = jax.jit(init_params, static_argnames="cfg")
_step = jax.jit(decode_step, static_argnames=("cfg", "backend"))


def one_layer(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """:func:`gdn_jax.decode_step`: each layer of a chain takes the last one's output."""
    for tier in TIERS:
        links = min(links_for(_weight_bytes(cfg, tier)), 8)
        for batch in batches:
            for backend in backends:
                yield _workload(f"layer_{tier}", tier, cfg, batch, backend, links)


def stack(cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]) -> Iterator[Workload]:
    """48 layers of a LayerBank in one jit, one token a call: calls queued, and each waited for.

    In int4 on the GPU kernels also as several jits of a few layers each (``_by6`` in the shape), so
    that the device starts while the host still prepares the rest.
    """
    layers = STACK if on_gpu() else 2
    for batch, backend, tier in itertools.product(batches, backends, ("q4", "bf16")):
        shape, moved, flops = sizes(cfg, tier, batch)
        make = functools.partial(_make_stack, cfg, tier, backend, batch, layers)
        queued = Workload(
            f"stack_{tier}",
            backend,
            f"{layers}x{shape}",
            batch,
            layers * moved,
            layers * flops,
            1,
            make,
            layers=layers,
        )
        yield queued
        sync = dataclasses.replace(queued, kernel=f"{queued.kernel}_sync", measure=blocking)
        yield sync
        if tier == "q4" and backend == "pallas" and batch in GROUPED_BATCHES:
            for by in GROUPS if layers == STACK else ():
                divided = functools.partial(make, by=by)
                yield dataclasses.replace(sync, shape=f"{sync.shape}_by{by}", make=divided)


def sizes(cfg: GDNConfig, tier: str, batch: int) -> tuple[str, int, int]:
    """Shape, bytes and flops of a token in one layer: weights read, state read and written."""
    state = cfg.num_v_heads * cfg.head_k_dim * cfg.head_v_dim
    history = (cfg.conv_width - 1) * cfg.conv_dim
    moved = 8 * batch * (state + history + cfg.d_model)
    flops = batch * (2 * _weights(cfg, LARGE + _SMALL) + 7 * state)
    return f"d{cfg.d_model}", _weight_bytes(cfg, tier) + moved, flops


def _weights(cfg: GDNConfig, names: Sequence[str]) -> int:
    return sum(int(np.prod([size for _, size in param_dims(cfg)[name]])) for name in names)


def _weight_bytes(cfg: GDNConfig, tier: str) -> int:
    return int(_weights(cfg, LARGE) * _BITS[tier] / 8) + 4 * _weights(cfg, _SMALL)


def draw_params(cfg: GDNConfig, tier: str, key: jax.Array) -> GDNParams:
    """Weights of a layer, drawn on the device; int4 weights are drawn as int4."""
    params = _init(key, cfg=cfg)
    if tier == "f32":
        return params
    if tier == "bf16":
        large = {name: getattr(params, name).astype(jnp.bfloat16) for name in LARGE}
    else:
        keys = zip(LARGE, jax.random.split(key, len(LARGE)), strict=True)
        large = {name: products.draw_q4(*getattr(params, name).shape, k) for name, k in keys}
    return dataclasses.replace(params, **large)


def kernel_form(params: GDNParams) -> GDNParams:
    """The same weights, int4 laid out for the GPU kernel."""
    large = {name: getattr(params, name) for name in LARGE}
    packed = {n: jax.jit(to_kernel)(w) for n, w in large.items() if isinstance(w, Q4Array)}
    return dataclasses.replace(params, **packed)


def draw_state(cfg: GDNConfig, batch: int) -> tuple[GDNState, jax.Array]:
    """A state and an input x [B, D]; the rows are seven sequences in turn."""
    generator = np.random.default_rng(0)
    heads = (cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim)
    frames = (cfg.conv_width - 1, cfg.conv_dim)
    rows = np.arange(batch) % DISTINCT
    S, hist, x = (
        generator.normal(size=(DISTINCT, *dims)).astype(np.float32)[rows]
        for dims in (heads, frames, (cfg.d_model,))
    )
    return GDNState(jnp.asarray(S), jnp.asarray(hist)), jnp.asarray(x)


@functools.lru_cache
def exact_steps(cfg: GDNConfig, tier: str) -> list[dict[str, np.ndarray]]:
    """Every operator in float64 for each of the seven sequences' token, with the first weights."""
    return exact_rows(cfg, tier, *draw_state(cfg, DISTINCT))


def exact_rows(cfg: GDNConfig, tier: str, state: GDNState, x: Any) -> list[dict[str, np.ndarray]]:
    """Every operator in float64 for each row's token, with the first weights."""
    host = exact_weights(cfg, tier)
    S, hist, x = (oracle.wide(np.asarray(a)) for a in (state.S, state.conv_hist, x))
    return [oracle.step(host, cfg, S[b], hist[b], x[b]) for b in range(len(x))]


def exact_weights(cfg: GDNConfig, tier: str) -> dict[str, np.ndarray]:
    """The first weights in float64."""
    params = draw_params(cfg, tier, jax.random.key(0))
    return {name: _exact(getattr(params, name)) for name in param_dims(cfg)}


def layer_error(cfg: GDNConfig, tier: str, y: jax.Array, after: GDNState) -> float:
    """The worst max_rel to float64 of any row's output, state or history."""
    return rows_error(exact_steps(cfg, tier), y, after)


def rows_error(exact: Sequence[dict[str, np.ndarray]], y: jax.Array, after: GDNState) -> float:
    """The worst max_rel of any row's output, state or history, to ``exact[b % len(exact)]``."""
    found = {"OUT": y, "S": after.S, "HIST": after.conv_hist}
    return max(
        distance(row, exact[b % len(exact)][name]).max_rel
        for name, values in found.items()
        for b, row in enumerate(np.asarray(values))
    )


def _exact(w: Any) -> np.ndarray:
    return products.integers(w) if isinstance(w, Q4Array) else products.wide(w)


def _params(cfg: GDNConfig, tier: str, backend: str, layers: int) -> list[GDNParams]:
    drawn = (draw_params(cfg, tier, jax.random.key(layer)) for layer in range(layers))
    return [kernel_form(p) if backend == "pallas" else p for p in drawn]


def _workload(
    kernel: str, tier: str, cfg: GDNConfig, batch: int, backend: str, layers: int
) -> Workload:
    shape, moved, flops = sizes(cfg, tier, batch)
    rounds = rounds_for(moved, layers)

    @functools.partial(jax.jit, static_argnames="rounds", donate_argnums=0)
    def chain(carry, params, rounds):
        def walk(carry):
            states, x = carry
            after = []
            for weights, state in zip(params, states, strict=True):
                x, state = _step(weights, state, x, cfg=cfg, backend=backend)
                after.append(state)
            return after, x

        return walked(walk, carry, rounds)

    def make() -> Prepared:
        select_backend("decode_step", cfg, backend=backend)
        params = _params(cfg, tier, backend, layers)
        state, x = draw_state(cfg, batch)
        step = functools.partial(_step, cfg=cfg, backend=backend)
        y, _ = poisoned(step, params[0], state, x)
        states = [jax.tree.map(lambda s: s + 0.0, state) for _ in range(layers)]
        carry = poisoned(functools.partial(chain, rounds=1), (states, x + 0.0), params)
        # From the chain, which updates it in place; a step alone may not.
        first: GDNState = jax.tree.map(np.asarray, carry[0][0])
        return Prepared(
            lambda: layer_error(cfg, tier, y, first),
            lambda c: chain(c, params, rounds=rounds),
            carry,
        )

    return Workload(kernel, backend, shape, batch, moved, flops, layers * rounds, make)


@functools.lru_cache(maxsize=1)
def made_bank(cfg: GDNConfig, tier: str, backend: str, layers: int) -> LayerBank:
    """A bank of these layers, kept for the next workload that needs the same one."""
    bank = LayerBank(cfg, layers)
    for layer, params in enumerate(_params(cfg, tier, backend, layers)):
        bank = bank.preload(layer, params)
    return bank


@functools.lru_cache(maxsize=1)
def _token(
    cfg: GDNConfig, tier: str, backend: str, layers: int, by: int
) -> Callable[[Carry], Carry]:
    """One token through all layers, in jits of ``by`` layers that each take their own weights."""
    bank = made_bank(cfg, tier, backend, layers)
    programs = []
    for group in itertools.batched(range(layers), by):
        part = bank
        for other in set(range(layers)) - set(group):
            part = part.release(other)
        walk = functools.partial(_walk, group=group, backend=backend)
        programs.append((jax.jit(walk, donate_argnums=0), part))

    def token(carry: Carry) -> Carry:
        for program, part in programs:
            carry = program(carry, part)
        return carry

    return token


def _walk(carry: Carry, bank: LayerBank, group: Sequence[int], backend: str) -> Carry:
    state, x = carry
    for layer in group:
        x, state = bank.step(state, layer, x, backend=backend)
    return state, x


def _make_stack(
    cfg: GDNConfig, tier: str, backend: str, batch: int, layers: int, by: int | None = None
) -> Prepared:
    select_backend("decode_step", cfg, backend=backend)
    bank, token = (
        made_bank(cfg, tier, backend, layers),
        _token(cfg, tier, backend, layers, by or layers),
    )
    state, x = draw_state(cfg, batch)
    outputs = [x]
    for layer in range(layers):
        params = bank.layers[layer].params("bench", layer)
        y, _ = _step(params, state, outputs[-1], cfg=cfg, backend=backend)
        outputs.append(y)
    whole = jax.tree.map(lambda s: jnp.broadcast_to(s, (layers, *s.shape)) + 0.0, state)
    carry = poisoned(token, (whole, x + 0.0))
    first: GDNState = jax.tree.map(lambda s: np.asarray(s[0]), carry[0])
    apart = distance(np.asarray(carry[1]), np.asarray(outputs[-1])).max_rel

    def check() -> float:
        return layer_error(cfg, tier, outputs[1], first) if apart < _WIRED else math.inf

    detail = f"first layer to float64; the stack {apart:.1e} from its layers one by one"
    return Prepared(check, token, carry, detail)
