"""A pool that several threads change: every sequence equals its solo run."""

import concurrent.futures
import itertools
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from tests.support.sequences import (
    BANK,
    CFG,
    IDLE,
    LAYER,
    VOCABULARY,
    L,
    assert_holds,
    recomputed,
    rows,
)
from tests.support.tools import assert_refused, assert_same_bits

THREADS, SLOTS, ROUNDS = 4, 12, 12


def worker(
    shared: gdn.SharedPool, seed: int, start: threading.Barrier
) -> dict[int, tuple[int, ...]]:
    """Step, fork, draft and free own slots; the tokens of those that are left."""
    rng = np.random.default_rng(seed)
    start.wait()
    mine: dict[int, tuple[int, ...]] = {int(shared.alloc(1)[0]): ()}
    for _ in range(ROUNDS):
        slot = int(rng.choice(list(mine)))
        token, other = (int(t) for t in rng.integers(0, len(VOCABULARY), 2))
        op = rng.choice(["step", "step", "fork", "free", "draft", "reset", "copy out"])
        if op == "step":
            x = jnp.stack([VOCABULARY[token], VOCABULARY[other]])
            y = shared.step(BANK, LAYER, x, rows(slot, IDLE))
            mine[slot] += (token,)
            assert_same_bits(y[0], recomputed(mine[slot])[0])
        elif op == "fork" and len(mine) < SLOTS // THREADS:
            mine[int(shared.fork(slot, 1)[0])] = mine[slot]
        elif op == "free" and len(mine) > 1:
            shared.free(rows(slot))
            del mine[slot]
        elif op == "draft":
            xs = jnp.stack([VOCABULARY[jnp.asarray([token, other])]] * 2)
            _, record = shared.draft(BANK, LAYER, xs, rows(slot, IDLE), scheme="replay")
            taken = int(rng.integers(0, 3))
            shared.commit({LAYER: record}, rows(slot, IDLE), rows(taken, 0))
            mine[slot] += (token, other)[:taken]
        elif op == "reset":
            shared.reset(rows(slot))
            mine[slot] = ()
        elif op == "copy out":
            kept = shared.checkpoint(slot)
            assert_same_bits(kept.S, recomputed(mine[slot])[1].S[:, 0])
    return mine


@pytest.mark.slow
def test_threads_on_slots_of_one_pool() -> None:
    shared = gdn.SharedPool(gdn.StatePool.create(CFG, L, SLOTS))
    start = threading.Barrier(THREADS)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        found = [threads.submit(worker, shared, seed, start) for seed in range(THREADS)]
        owned = [future.result() for future in found]
    slots = list(itertools.chain(*owned))
    assert len(set(slots)) == len(slots), "one slot was given to two threads"
    assert sorted(slots) == shared.used.tolist()
    arrays = shared.export(np.asarray(slots, np.int32))
    tokens = list(itertools.chain(*(mine.values() for mine in owned)))
    assert sum(map(len, tokens)) > THREADS
    for i, each in enumerate(tokens):
        state = recomputed(each)[1]
        for name, x in arrays.items():
            assert_same_bits(x[:, i], getattr(state, name)[:, 0], f"{name} after {each}")


def test_threads_share_a_store_of_prefixes() -> None:
    kept = gdn.StatePool.create(CFG, L, 1).alloc(1)[0].checkpoint(0)
    store = gdn.PrefixStates(3 * kept.nbytes)
    start = threading.Barrier(THREADS)

    def put_and_get(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for key in rng.integers(0, 6, 200).tolist():
            store.put(key, kept)
            assert store.nbytes <= store.budget
            store.get(int(rng.integers(0, 6)))
            store.discard(int(rng.integers(0, 6)))

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        for future in [threads.submit(put_and_get, seed) for seed in range(THREADS)]:
            future.result()
    assert len(store.keys()) <= 3


def test_the_rest_goes_through_too(tmp_path: Path) -> None:
    shared = gdn.SharedPool(gdn.StatePool.create(CFG, L, 4))
    a, b = (int(slot) for slot in shared.alloc(2))
    shared.step(BANK, LAYER, VOCABULARY[:2], rows(a, IDLE), write_slots=rows(b, IDLE))
    (c,) = shared.branch(shared.checkpoint(b), 1)
    shared.copy(b, a)
    shared.import_(rows(b), shared.export(c))
    shared.save(tmp_path / "pool")
    assert shared.occupancy == 3
    pool = gdn.load_pool(tmp_path / "pool", CFG)
    for slot in (a, b, int(c)):
        assert_holds(pool, slot, (0,))


def test_what_is_refused_changes_nothing() -> None:
    shared = gdn.SharedPool(gdn.StatePool.create(CFG, L, 2))
    slots = shared.alloc(2)
    x = VOCABULARY[:2]
    assert_refused(lambda: shared.alloc(1), "0 of 2", error=gdn.PoolFullError)
    assert_refused(lambda: shared.step(BANK, LAYER, x, rows(0, 0)), "every slot once")
    with pytest.raises(gdn.LayerNotResidentError):
        shared.step(BANK, 0, x, slots)
    _, record = shared.draft(BANK, LAYER, x[:, None], slots)
    assert_refused(
        lambda: shared.commit({LAYER: record}, slots, rows(1, 2)), "needed 0 to 1",
        error=gdn.ShapeError,
    )  # fmt: skip
    wrong: Any = {}
    assert_refused(lambda: gdn.SharedPool(wrong), "is a dict", error=gdn.ShapeError)
    shared.free(slots)
    assert_refused(lambda: shared.free(slots), "was freed")
    assert shared.occupancy == 0
