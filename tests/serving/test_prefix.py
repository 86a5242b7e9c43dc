"""Checkpoints of a slot, branches from them, and the store of prefix states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from tests.support.sequences import CFG, IDLE, VOCABULARY, L, N, assert_holds, new_pool, rows, step
from tests.support.tools import assert_refused, assert_same_bits

ONE = 4 * L * (CFG.num_v_heads * CFG.head_k_dim * CFG.head_v_dim + 2 * CFG.conv_dim)
"""Bytes of a checkpoint."""


def decoded(pool: gdn.StatePool, slot: int, *tokens: int) -> gdn.StatePool:
    for token in tokens:
        x = jnp.stack([VOCABULARY[token]] * 2)
        _, pool = step(pool, x, rows(slot, IDLE), rows(slot, IDLE))
    return pool


def kept_in(store: gdn.PrefixStates, key: Any) -> gdn.PrefixState:
    found = store.get(key)
    assert found is not None
    return found


def checkpoint_of(*tokens: int) -> gdn.PrefixState:
    pool, (slot,) = new_pool().alloc(1)
    return decoded(pool, int(slot), *tokens).checkpoint(slot)


@pytest.mark.parametrize("donate", [False, True])
def test_branches_go_on_from_a_prefix_that_has_gone_on_itself(donate: bool) -> None:
    pool, (prefix,) = new_pool().alloc(1)
    pool = decoded(pool, int(prefix), 0, 1, 2)
    kept = pool.checkpoint(prefix)
    assert kept.nbytes == ONE
    pool = decoded(pool, int(prefix), 3)
    pool, (a, b) = pool.branch(kept, 2, donate=donate)
    pool = decoded(pool, int(b), 5)
    for slot, tokens in ((prefix, (0, 1, 2, 3)), (a, (0, 1, 2)), (b, (0, 1, 2, 5))):
        assert_holds(pool, int(slot), tokens)
    pool, (again,) = gdn.StatePool.create(CFG, L, 1).branch(kept, 1)
    assert_holds(pool, int(again), (0, 1, 2))


def test_what_is_no_branch_is_refused() -> None:
    pool, slots = new_pool().alloc(2)
    kept = pool.checkpoint(slots[0])
    wrong: Any = {}
    other = gdn.GDNConfig(64, 2, 4, 16, 8, conv_width=4)
    assert_refused(lambda: pool.checkpoint(slots), "shape (2,)", "needed one slot")
    assert_refused(lambda: pool.checkpoint(N - 1), "never handed out")
    assert_refused(lambda: pool.branch(kept, N - 1), "2 of 4", "needed 3", error=gdn.PoolFullError)
    for where, fragment in (
        (lambda: pool.branch(wrong, 1), "is a dict; needed gdn_jax.PrefixState"),
        (lambda: gdn.StatePool.create(other, L, N).branch(kept, 1), "conv_width=3"),
        (lambda: gdn.StatePool.create(CFG, L + 1, N).branch(kept, 1), "L=3"),
    ):
        assert_refused(where, "StatePool.branch", fragment, error=gdn.ShapeError)
    assert pool.occupancy == 2


def test_a_store_gives_back_every_bit_and_drops_what_was_used_longest_ago() -> None:
    store = gdn.PrefixStates(2 * ONE + 8)
    for key in ("a", "b"):
        store.put(key, checkpoint_of(ord(key) % 8))
    assert store.get("a") is not None
    store.put("c", checkpoint_of(3, 4))
    assert store.keys() == ["a", "c"]
    assert store.nbytes == 2 * ONE
    assert store.get("b") is None
    pool, (slot,) = new_pool().branch(kept_in(store, "c"), 1)
    assert_holds(pool, int(slot), (3, 4))
    assert store.error("c") == 0.0


def test_a_key_is_replaced_and_discarded() -> None:
    store = gdn.PrefixStates(ONE)
    store.put(("user", 1), checkpoint_of(1))
    store.put(("user", 1), checkpoint_of(2))
    assert store.keys() == [("user", 1)]
    pool, (slot,) = new_pool().branch(kept_in(store, ("user", 1)), 1)
    assert_holds(pool, int(slot), (2,))
    store.discard(("user", 1))
    store.discard("never kept")
    assert store.nbytes == 0
    with pytest.raises(KeyError):
        store.error(("user", 1))


@pytest.mark.parametrize(("compress", "most"), [("float16", 5e-4), ("int8", 4e-3)])
def test_compression_is_measured_and_given_back_in_float32(compress: str, most: float) -> None:
    exact = checkpoint_of(*range(8))
    store = gdn.PrefixStates(ONE, compress=compress)
    store.put(0, exact)
    found = kept_in(store, 0)
    assert found.S.dtype == jnp.float32
    assert_same_bits(found.conv_hist, exact.conv_hist)
    apart = np.abs(np.asarray(found.S) - np.asarray(exact.S)).max() / np.abs(exact.S).max()
    assert store.error(0) == pytest.approx(apart, rel=1e-5)
    assert 0 < apart < most
    history = exact.conv_hist.nbytes
    scales = 4 * exact.S.size // CFG.head_v_dim
    width = 2 if compress == "float16" else 1
    assert store.nbytes == exact.S.size * width + scales + history
    # A row by itself: small rows beside large ones keep their own precision.
    rowwise = np.abs(np.asarray(found.S - exact.S)).max(-1)
    assert (rowwise <= most * np.abs(np.asarray(exact.S)).max(-1) + 1e-30).all()


def test_compression_keeps_zeros_and_what_float16_cannot_hold() -> None:
    for S in (0.0, 1e30, 1e-30):
        exact = jax.tree.map(lambda x, S=S: jnp.full_like(x, S), checkpoint_of())
        for compress in ("float16", "int8"):
            store = gdn.PrefixStates(ONE, compress=compress)
            store.put(0, exact)
            found = kept_in(store, 0)
            np.testing.assert_allclose(found.S, exact.S, rtol=1e-6)
            assert store.error(0) < 1e-6


def test_what_a_store_refuses_changes_nothing() -> None:
    store = gdn.PrefixStates(ONE, compress="int8")
    store.put(0, checkpoint_of(1))
    spoilt = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), checkpoint_of(1))

    def refuse(call: Any, *fragments: str, error: type[Exception] = gdn.ShapeError) -> None:
        assert_refused(call, *fragments, error=error)

    refuse(lambda: store.put(0, spoilt), "0 is not finite", "int8")
    wrong: Any = new_pool()
    refuse(lambda: store.put(0, wrong), "0 is a StatePool; needed gdn_jax.PrefixState")
    refuse(lambda: gdn.PrefixStates(ONE - 1).put("k", checkpoint_of()), f"'k' takes {ONE} bytes")
    half: Any = 1.5
    refuse(lambda: gdn.PrefixStates(half), "budget is 1.5")
    refuse(
        lambda: gdn.PrefixStates(1, compress="zip"), "'zip'", "float16, int8",
        error=gdn.UnknownNameError,
    )  # fmt: skip
    assert store.keys() == [0]
    assert store.error(0) > 0
