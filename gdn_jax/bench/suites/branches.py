"""What branches of a sequence cost in one layer: forks, drafts and commits, for each scheme."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax._core.backend import select_backend
from gdn_jax.bench.pools import Contents, rows_of
from gdn_jax.bench.suites.layer import DISTINCT, draw_state, exact_weights, made_bank, sizes
from gdn_jax.bench.workload import Prepared, Workload, links_for, poisoned, rounds_for
from gdn_jax.config import GDNConfig
from gdn_jax.layer.state import GDNState
from gdn_jax.report.metrics import distance
from gdn_jax.serving.bank import LayerBank
from gdn_jax.serving.drafts import SCHEMES, DraftRecord
from gdn_jax.serving.pool import StatePool

Drafted = tuple[jax.Array, Any, Any]

TIER = "q4"
TD = 4
"""Tokens of a draft."""
BATCH = 8
"""The batch that is measured besides the first one, where it is asked for."""
COMMITS = 32
"""The most layers of a chain: a draft or commit is many small launches, and a loop in replay."""
_OPERANDS = ("Q", "K", "V", "G", "BETA")


def workloads(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """Drafts on each backend; commits and forks on xla alone, since they use no kernel."""
    few = [batch for batch in batches if batch in (batches[0], BATCH)]
    for batch in few:
        for scheme in SCHEMES:
            for backend in backends:
                yield _draft_workload(cfg, batch, scheme, backend)
    for batch in few if "xla" in backends else ():
        for scheme in SCHEMES:
            yield _commit_workload(cfg, batch, scheme)
        yield _fork_workload(cfg, batch)


def state_bytes(cfg: GDNConfig) -> tuple[int, int]:
    """Bytes of one sequence's S and history in one layer."""
    S = 4 * cfg.num_v_heads * cfg.head_k_dim * cfg.head_v_dim
    return S, 4 * (cfg.conv_width - 1) * cfg.conv_dim


def record_bytes(cfg: GDNConfig, scheme: str) -> int:
    """Bytes that a draft keeps of one row, without the convolution's inputs."""
    if scheme == "snapshot":
        return TD * state_bytes(cfg)[0]
    return 4 * TD * (2 * cfg.key_dim + cfg.value_dim + 2 * cfg.num_v_heads)


@functools.lru_cache
def exact_tokens(cfg: GDNConfig, count: int) -> list[dict[str, np.ndarray]]:
    """Every operator [TD, ..] of the drafts of the first ``count`` sequences in float64."""
    host, (state, _), xs = exact_weights(cfg, TIER), draw_state(cfg, DISTINCT), _tokens(cfg, count)
    S, hist = np.asarray(state.S), np.asarray(state.conv_hist)
    traces = []
    for b in range(count):
        found = oracle.layer_trace(host, cfg, xs[b], S=S[b], conv_hist=hist[b])
        traces.append(found | {"V": found["XCV"][:, 2 * cfg.key_dim :]})
    return traces


def _tokens(cfg: GDNConfig, batch: int) -> np.ndarray:
    drawn = np.random.default_rng(1).normal(size=(DISTINCT, TD, cfg.d_model)).astype(np.float32)
    return drawn[np.arange(batch) % DISTINCT]


def _accepted(batch: int) -> np.ndarray:
    """How many tokens each row accepts: from one to all, never equal in neighbouring rows."""
    return (1 + (np.arange(batch, dtype=np.int32) + 2) % TD).astype(np.int32)


def _committed_error(cfg: GDNConfig, after: GDNState) -> float:
    """The worst max_rel of any row's state or history to serial decoding in float64."""
    batch = len(after.S)
    exact = exact_tokens(cfg, min(batch, DISTINCT))
    return max(
        distance(np.asarray(values[b]), exact[b % DISTINCT][name][n - 1]).max_rel
        for name, values in (("S", after.S), ("HIST", after.conv_hist))
        for b, n in enumerate(_accepted(batch))
    )


def _draft_workload(cfg: GDNConfig, batch: int, scheme: str, backend: str) -> Workload:
    """``LayerBank.draft_slots``: TD decode steps, and writing the record that is kept of them."""
    shape, moved, flops = sizes(cfg, TIER, batch)
    kept = batch * (record_bytes(cfg, scheme) + 4 * TD * cfg.conv_dim)
    moved, flops = TD * moved + kept, TD * flops
    layers = _layers(cfg, batch)
    rounds = rounds_for(moved, layers)
    make = functools.partial(_make_draft, cfg, batch, scheme, backend, layers, rounds)
    name, links, tokens = f"draft_{scheme}", layers * rounds, TD * batch
    shape = f"{shape}_t{TD}"
    return Workload(name, backend, shape, batch, moved, flops, links, make, tokens=tokens)


def _make_draft(
    cfg: GDNConfig, batch: int, scheme: str, backend: str, layers: int, rounds: int
) -> Prepared:
    select_backend("decode", cfg, backend=backend)
    bank, pool, rows, xs = _start(cfg, batch, backend, layers)

    def run(carry: Drafted, rounds: int = rounds) -> Drafted:
        return _drafts(carry[0], bank, pool, rows, rounds, scheme, backend)

    carry = poisoned(functools.partial(run, rounds=1), (xs, None, None))
    _, _, (ys, record) = carry
    detail = "outputs and all that is kept, to float64"
    return Prepared(lambda: draft_error(cfg, ys, record), run, carry, detail)


def _layers(cfg: GDNConfig, batch: int) -> int:
    """How many layers a chain of drafts has."""
    return min(links_for(TD * sizes(cfg, TIER, batch)[1]), 8)


def _start(
    cfg: GDNConfig, batch: int, backend: str, layers: int
) -> tuple[LayerBank, StatePool, jax.Array, jax.Array]:
    """Weights, a pool, those of its slots that have rows, and the inputs of their drafts."""
    contents = Contents.draw(cfg, layers, 2 * batch, batch)
    xs = jnp.asarray(_tokens(cfg, batch))
    bank = made_bank(cfg, TIER, backend, layers)
    return bank, contents.pool(), jnp.asarray(contents.rows[0]), xs


def draft_error(cfg: GDNConfig, ys: jax.Array, record: DraftRecord) -> float:
    """The worst max_rel to float64 of a draft's outputs and of all that its record keeps."""
    batch = len(ys)
    kept = {"S": record.S} | dict(zip(_OPERANDS, record.operands or [None] * 5, strict=True))
    kept |= {"OUT": jnp.swapaxes(ys, 0, 1), "XC": record.frames}
    found = {name: np.asarray(x) for name, x in kept.items() if x is not None}
    exact = exact_tokens(cfg, min(batch, DISTINCT))
    return max(
        distance(values[:, b], exact[b % DISTINCT][name].reshape(values[:, b].shape)).max_rel
        for name, values in found.items()
        for b in range(batch)
    )


def _commit_workload(cfg: GDNConfig, batch: int, scheme: str) -> Workload:
    """``StatePool.commit``: the state is read or recomputed from the record, and written."""
    S, hist = state_bytes(cfg)
    moved = 2 * batch * (S + hist) + (batch * record_bytes(cfg, scheme)) * (scheme == "replay")
    links = min(links_for(moved), COMMITS)
    flops = 7 * sum(_accepted(batch).tolist()) * (S // 4) * (scheme == "replay")
    make = functools.partial(_make_commit, cfg, batch, scheme, links)
    shape = f"d{cfg.d_model}_t{TD}"
    return Workload(f"commit_{scheme}", "xla", shape, batch, moved, flops, links, make)


def _make_commit(cfg: GDNConfig, batch: int, scheme: str, links: int) -> Prepared:
    bank, pool, rows, xs = _start(cfg, batch, "xla", _layers(cfg, batch))
    _, _, (_, record) = _drafts(xs, bank, pool, rows, 1, scheme, "xla")
    contents = Contents.draw(cfg, 1, (links + 1) * batch, batch, links)
    pairs = [(jax.tree.map(jnp.copy, record), rows) for rows in jnp.asarray(contents.rows)]
    accepted = jnp.asarray(_accepted(batch))
    pool = _commits(contents.pool(), pairs, accepted)
    after = rows_of(pool, jnp.asarray(contents.rows.ravel()))
    changed = contents.changed(pool, but=contents.rows)

    def check() -> float:
        parts = (jax.tree.map(lambda x, i=i: x[i * batch :][:batch], after) for i in range(links))
        return math.inf if changed else max(_committed_error(cfg, part) for part in parts)

    return Prepared(check, lambda c: _commits(c, pairs, accepted), pool)


def _fork_workload(cfg: GDNConfig, batch: int) -> Workload:
    """The device's part of ``StatePool.fork``: one slot is read, ``batch`` slots are written."""
    moved = (1 + batch) * sum(state_bytes(cfg))
    links = links_for(moved)
    rounds = rounds_for(moved, links)
    make = functools.partial(_make_fork, cfg, batch, links, rounds)
    unit, shape = "wrong slots", f"d{cfg.d_model}"
    return Workload("fork", "xla", shape, batch, moved, 0, links * rounds, make, 0, unit)


def _make_fork(cfg: GDNConfig, batch: int, links: int, rounds: int) -> Prepared:
    contents = Contents.draw(cfg, 1, (links + 1) * (batch + 1), batch + 1, links)
    # Each link's source holds numbers of its own, so a branch of the wrong source is seen.
    contents.held[contents.rows] = DISTINCT * contents.rows
    groups = list(jnp.asarray(contents.rows))
    pool = _forks(contents.pool(), groups, 1)
    contents.held[contents.rows] = contents.held[contents.rows[:, :1]]
    wrong = contents.changed(pool, but=contents.rows[:0])
    detail = "bits of all slots"
    return Prepared(lambda: wrong, lambda c: _forks(c, groups, rounds), pool, detail)


@functools.partial(jax.jit, static_argnames=("layer", "scheme", "backend"))
def _draft(
    bank: LayerBank,
    pool: StatePool,
    layer: int,
    xs: jax.Array,
    rows: jax.Array,
    scheme: str,
    backend: str,
) -> tuple[jax.Array, DraftRecord]:
    return bank.draft_slots(pool, layer, xs, rows, scheme=scheme, backend=backend)


@functools.partial(jax.jit, static_argnames=("rounds", "scheme", "backend"))
def _drafts(
    xs: jax.Array,
    bank: LayerBank,
    pool: StatePool,
    rows: jax.Array,
    rounds: int,
    scheme: str,
    backend: str,
) -> Drafted:
    """Drafts of all layers, each from the outputs of the one before.

    The last outputs, and the first draft's outputs with its record. An element of each array of the
    other records is returned too, so that the compiler must compute them all.
    """
    kept, drafts = [], []
    for layer in [*range(bank.num_layers)] * rounds:
        xs, record = _draft(bank, pool, layer, xs, rows, scheme, backend)
        arrays = jax.tree.leaves((record.S, record.operands, record.frames))
        kept += [x[(0,) * x.ndim] for x in arrays]
        drafts.append((xs, record))
    return xs, jnp.stack(kept), drafts[0]


@functools.partial(jax.jit, donate_argnums=0)
def _commits(
    pool: StatePool, pairs: list[tuple[DraftRecord, jax.Array]], accepted: jax.Array
) -> StatePool:
    for record, rows in pairs:
        pool = pool.commit({0: record}, rows, accepted)
    return pool


@functools.partial(jax.jit, static_argnames="rounds", donate_argnums=0)
def _forks(pool: StatePool, groups: list[jax.Array], rounds: int) -> StatePool:
    for group in groups * rounds:
        pool = pool.copy(group[:1], group[1:])
    return pool
