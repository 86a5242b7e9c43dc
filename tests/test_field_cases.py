"""Faults that other systems shipped in states, padding and drafts, each with its right value."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.serving.drafts import SCHEMES
from tests.support.sequences import (  # fmt: skip
    CFG,
    IDLE,
    LAYER,
    VOCABULARY,
    B,
    assert_holds,
    commit,
    draft,
    new_pool,
    recomputed,
    rows,
    step,
)
from tests.support.tools import assert_close, assert_refused, assert_same_bits

W = CFG.conv_width
TD = W + 2


def advanced(pool: gdn.StatePool, slot: int, *tokens: int) -> gdn.StatePool:
    for token in tokens:
        _, pool = step(
            pool, VOCABULARY[jnp.asarray([token, 0])], rows(slot, IDLE), rows(slot, IDLE)
        )
    return pool


def drafted(
    pool: gdn.StatePool, slots: Any, tokens: Any, scheme: str, lengths: Any = None
) -> tuple[np.ndarray, Any]:
    """Outputs and record of a chain."""
    xs = VOCABULARY[jnp.asarray(tokens)]
    rows_, td = xs.shape[:2]
    lengths = jnp.full(rows_, td, jnp.int32) if lengths is None else lengths
    chain = jnp.broadcast_to(jnp.arange(-1, td - 1), (rows_, td))
    ys, record = draft(pool, xs, slots, lengths, chain, scheme=scheme)
    return np.asarray(ys), record


def test_fewer_tokens_than_taps_shift_a_live_history() -> None:
    hist = jnp.asarray(np.random.default_rng(0).normal(size=(1, W - 1, CFG.conv_dim)), jnp.float32)
    x = jnp.ones((1, 1, CFG.conv_dim))
    _, new = gdn.causal_conv1d(x, hist, jnp.ones((CFG.conv_dim, W)))
    assert_same_bits(new[:, :-1], hist[:, 1:])
    assert_same_bits(new[:, -1:], x)
    pool, (slot,) = new_pool().alloc(1)
    assert_holds(advanced(pool, int(slot), 3), int(slot), (3,))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_right_padding_is_neither_decayed_nor_written(scheme: str) -> None:
    pool, slots = new_pool().alloc(B)
    lengths = rows(1, TD)
    xs = VOCABULARY[jnp.asarray([[1, *[0] * (TD - 1)], list(range(TD))])]
    xs = xs.at[0, 1:].set(jnp.nan)
    chain = jnp.broadcast_to(jnp.arange(-1, TD - 1), (B, TD))
    ys, record = draft(pool, xs, slots, lengths, chain, scheme=scheme)
    pool = commit(pool, record, slots, lengths)
    np.testing.assert_array_equal(ys[0, 1:], 0)
    assert_holds(pool, int(slots[0]), (1,))
    assert_holds(pool, int(slots[1]), tuple(range(TD)))


def test_left_padding_is_an_idle_row_until_the_first_token() -> None:
    pool, slots = new_pool().alloc(B)
    tokens = np.array([[7, 7, 5, 6], [1, 2, 3, 4]])
    for t, column in enumerate(tokens.T):
        here = jnp.where(jnp.asarray([t >= 2, True]), slots, IDLE)
        y, pool = step(pool, VOCABULARY[column], here, here)
        assert t >= 2 or not np.any(y[0])
    assert_holds(pool, int(slots[0]), (5, 6))
    assert_holds(pool, int(slots[1]), (1, 2, 3, 4))


@pytest.mark.parametrize("left_by_the_owner_before", [np.nan, np.inf, 3.0])
def test_a_recycled_slot_starts_from_zeros(left_by_the_owner_before: float) -> None:
    pool, slots = new_pool().alloc(4)
    spoilt = {
        n: jnp.full_like(getattr(pool, n), left_by_the_owner_before) for n in ("S", "conv_hist")
    }
    pool, (slot,) = dataclasses.replace(pool, **spoilt).free(slots).alloc(1)
    for name in spoilt:
        np.testing.assert_array_equal(getattr(pool, name)[:, slot], 0)
    assert_holds(advanced(pool, int(slot), 1, 2), int(slot), (1, 2))


def test_the_state_is_float32_whatever_the_weights_are_and_nothing_else_is_taken() -> None:
    pool, slots = new_pool().alloc(B)
    params = gdn.init_params(jax.random.key(0), CFG)
    half = jnp.asarray(params.in_proj_qkv, jnp.bfloat16)
    bank = gdn.LayerBank(CFG, 2).preload(LAYER, dataclasses.replace(params, in_proj_qkv=half))
    y, after = jax.jit(bank.step_slots, static_argnums=1)(pool, LAYER, VOCABULARY[:B], slots)
    assert {x.dtype for x in (y, after.S, after.conv_hist)} == {jnp.dtype("float32")}
    rounded = dataclasses.replace(pool, S=pool.S.astype(jnp.bfloat16))
    assert_refused(
        lambda: bank.step_slots(rounded, LAYER, VOCABULARY[:B], slots), "pool.S", "bfloat16",
        error=gdn.ShapeError,
    )  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("accepted", [2, TD])
def test_after_drafts_were_accepted_a_step_with_none_reads_where_they_end(
    scheme: str, accepted: int
) -> None:
    pool, slots = new_pool().alloc(1)
    pair, draft = jnp.asarray([slots[0], IDLE]), list(range(1, TD + 1))
    _, record = drafted(pool, pair, [draft] * B, scheme)
    pool = commit(pool, record, pair, rows(accepted, 0))
    _, record = drafted(pool, pair, [[7] * TD] * B, scheme)
    pool = commit(pool, record, pair, rows(0, 0))
    y, pool = step(pool, VOCABULARY[jnp.asarray([6, 0])], pair, pair)
    tokens = (*draft[:accepted], 6)
    assert_holds(pool, int(slots[0]), tokens)
    assert_same_bits(y[0], recomputed(tokens)[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_accepted_count_of_the_taps_or_more_is_not_clamped(scheme: str) -> None:
    for accepted in range(W - 1, TD + 1):
        pool, slots = new_pool().alloc(B)
        _, record = drafted(pool, slots, [list(range(TD))] * B, scheme)
        pool = commit(pool, record, slots, rows(accepted, accepted))
        for slot in slots.tolist():
            assert_holds(pool, slot, tuple(range(accepted)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_row_is_committed_by_its_own_count(scheme: str) -> None:
    counts = rows(2, 4, 3)
    pool, slots = new_pool().alloc(3)
    tokens = np.arange(12).reshape(3, 4) % len(VOCABULARY)
    _, record = drafted(pool, slots, tokens, scheme, lengths=counts)
    pool = commit(pool, record, slots, counts)
    for slot, row, count in zip(slots.tolist(), tokens.tolist(), counts.tolist(), strict=True):
        alone, (own,) = gdn.StatePool.create(CFG, 2, 3).alloc(1)
        # A batch of three by itself: bits depend on the batch.
        x = VOCABULARY[jnp.asarray(row)]
        for t in range(count):
            together = rows(int(own), IDLE, IDLE)
            _, alone = step(alone, jnp.stack([x[t]] * 3), together, together)
        for name in ("S", "conv_hist"):
            found, wanted = getattr(pool, name)[:, slot], getattr(alone, name)[:, own]
            assert_close(found, wanted, 1e-6, f"{name} of {slot}")


def test_an_idle_row_leaves_slot_0_and_everything_else_alone() -> None:
    pool, _ = new_pool().alloc(B)
    pool = advanced(advanced(pool, 0, 1, 2), 1, 3)
    x = VOCABULARY[:B].at[1].set(jnp.nan)
    y, after = step(pool, x, rows(1, IDLE), rows(1, IDLE))
    np.testing.assert_array_equal(y[1], 0)
    assert_holds(after, 0, (1, 2))
    assert_holds(after, 1, (3, 0))
    y, after = step(pool, x, rows(IDLE, IDLE), rows(IDLE, IDLE))
    np.testing.assert_array_equal(y, 0)
    for name in ("S", "conv_hist"):
        assert_same_bits(getattr(after, name), getattr(pool, name))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_draft_of_one_token_is_a_step(scheme: str) -> None:
    pool, slots = new_pool().alloc(B)
    pool = advanced(pool, int(slots[0]), 4, 5)
    ys, record = drafted(pool, slots, [[1], [2]], scheme)
    y, stepped = step(pool, VOCABULARY[1:3], slots, slots)
    committed = commit(pool, record, slots, rows(1, 1))
    assert_same_bits(ys[:, 0], y)
    for name in ("S", "conv_hist"):
        assert_same_bits(getattr(committed, name), getattr(stepped, name))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rejected_drafts_leave_no_trace(scheme: str) -> None:
    pool, slots = new_pool().alloc(B)
    pool = advanced(pool, int(slots[0]), 4, 5)
    _, record = drafted(pool, slots, [[1] * TD] * B, scheme)
    after = commit(pool, record, slots, rows(0, 0))
    for name in ("S", "conv_hist"):
        assert_same_bits(getattr(after, name), getattr(pool, name))
