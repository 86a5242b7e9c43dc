"""Sequences in the slots of a pool: steps by the batch, the pool's size and the sequences' age."""

import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax._core.backend import select_backend
from gdn_jax.bench.pools import Contents, rows_of
from gdn_jax.bench.suites import branches
from gdn_jax.bench.suites.layer import (
    DISTINCT,
    draw_state,
    exact_rows,
    exact_steps,
    made_bank,
    rows_error,
    sizes,
)
from gdn_jax.bench.workload import Prepared, Workload, links_for, on_gpu, poison, rounds_for
from gdn_jax.config import GDNConfig
from gdn_jax.report.record import Check, Row
from gdn_jax.serving.bank import LayerBank
from gdn_jax.serving.pool import StatePool

Carry = tuple[StatePool, jax.Array, jax.Array]

STEP = "slots_step_q4"
TIER = "q4"
POOLS = (8, 64, 512)
"""Sizes of the pools, in slots, in which one batch is stepped."""
BATCH8_LIMIT = 1.35


def workloads(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """Steps of every batch in one pool; of the first batch in other pools and in old sequences.

    Then the drafts, commits and forks of :mod:`gdn_jax.bench.suites.branches`.
    """
    first, slots = batches[0], max(2 * max(batches), 128 if on_gpu() else 1)
    others = [n for n in (POOLS if on_gpu() else POOLS[1:2]) if n >= first and n != slots]
    planned = [(batch, slots, 0) for batch in batches]
    planned += [(first, n, 0) for n in others]
    planned += [(first, slots, 1000 if on_gpu() else 16)]
    for batch, n, age in planned:
        for backend in backends:
            yield _workload(cfg, batch, n, age, backend)
    yield from branches.workloads(cfg, batches, backends)


def batch8(rows: Sequence[Row], copy_gbps: float | None) -> list[Check]:
    """The time at B = 8, less seven states' time at the copy's rate, over the time at B = 1.

    A check of the Pallas rows of one pool; none where either row has no time.
    """
    mine = [r for r in rows if (r["kernel"], r["backend"]) == (STEP, "pallas") and r["us"]]
    timed = {(r["shape"], r["batch"]): r for r in mine}
    for (shape, batch), many in timed.items():
        one = timed.get((shape, 1))
        if batch != 8 or one is None or not copy_gbps:
            continue
        more = (many["bytes"] - one["bytes"]) / copy_gbps / 1e3
        value = (many["us"] - more) / one["us"]
        detail = f"{many['us']:.2f} µs at B = 8, {one['us']:.2f} at 1; {more:.2f} for the states "
        detail += "of seven more"
        said = ("that a batch costs little more than its states", "that other shapes do")
        ok = value <= BATCH8_LIMIT
        return [Check("bench.slots_batch8", ok, value, BATCH8_LIMIT, "of one", detail, *said)]
    return []


def _workload(cfg: GDNConfig, batch: int, slots: int, age: int, backend: str) -> Workload:
    shape, moved, flops = sizes(cfg, TIER, batch)
    layers = min(links_for(moved), 8)
    rounds = rounds_for(moved, layers)
    make = functools.partial(_make, cfg, batch, slots, age, backend, layers, rounds)
    shape = f"{shape}_n{slots}" + (f"_t{age}" if age else "")
    links = layers * rounds
    return Workload(STEP, backend, shape, batch, moved, flops, links, make, tokens=batch)


def _make(
    cfg: GDNConfig, batch: int, slots: int, age: int, backend: str, layers: int, rounds: int
) -> Prepared:
    select_backend("decode_step", cfg, backend=backend)
    bank = made_bank(cfg, TIER, backend, layers)
    contents = Contents.draw(cfg, layers, slots, batch)
    rows = jnp.asarray(contents.rows[0])
    pool, (_, x) = contents.pool(), draw_state(cfg, batch)
    some = rows[:DISTINCT] if age else rows
    if age:
        pool = _aged(pool, bank, x, rows, age, backend)
        exact = exact_rows(cfg, TIER, rows_of(pool, some), x[: len(some)])
    else:
        exact = exact_steps(cfg, TIER)
    poison([x.nbytes])
    carry = _steps((pool, x + 0.0, x + 1.0), bank, rows, 1, backend)
    y, after = carry[2][: len(some)] + 0.0, rows_of(carry[0], some)
    changed = contents.changed(carry[0], but=contents.rows)

    def check() -> float:
        return math.inf if changed else rows_error(exact, y, after)

    detail = f"to float64; {changed} of the other {layers * (slots - batch)} slots changed"
    return Prepared(check, lambda c: _steps(c, bank, rows, rounds, backend), carry, detail)


@functools.partial(jax.jit, static_argnames=("layer", "backend"))
def _step(
    bank: LayerBank, pool: StatePool, layer: int, x: jax.Array, rows: jax.Array, backend: str
) -> tuple[jax.Array, StatePool]:
    return bank.step_slots(pool, layer, x, rows, backend=backend)


@functools.partial(jax.jit, static_argnames=("rounds", "backend"), donate_argnums=0)
def _steps(carry: Carry, bank: LayerBank, rows: jax.Array, rounds: int, backend: str) -> Carry:
    """``rounds`` tokens through all layers: the pool, the last output and the very first one."""
    pool, x, _ = carry
    outputs = []
    for layer in [*range(bank.num_layers)] * rounds:
        x, pool = _step(bank, pool, layer, x, rows, backend)
        outputs.append(x)
    return pool, x, outputs[0]


@functools.partial(jax.jit, static_argnames=("age", "backend"), donate_argnums=0)
def _aged(
    pool: StatePool, bank: LayerBank, x: jax.Array, rows: jax.Array, age: int, backend: str
) -> StatePool:
    """The pool after ``age`` tokens in every layer."""

    def token(pool: StatePool, t: jax.Array) -> tuple[StatePool, None]:
        for layer in range(bank.num_layers):
            _, pool = bank.step_slots(pool, layer, jnp.roll(x, t, 1), rows, backend=backend)
        return pool, None

    return lax.scan(token, pool, jnp.arange(age))[0]
