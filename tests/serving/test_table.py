"""Steps, drafts and commits in a pool's slots against a model that recomputes every sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn_jax as gdn
from gdn_jax.serving.drafts import SCHEMES
from tests.support.sequences import (
    BANK,
    CFG,
    IDLE,
    LAYER,
    TD,
    VOCABULARY,
    B,
    L,
    N,
    assert_holds,
    commit,
    draft,
    new_pool,
    recomputed,
    rows,
    step,
)
from tests.support.tools import assert_close, assert_refused, assert_same_bits

OPERATIONS = ("alloc", "step", "fork", "draft", "free", "reset", "checkpoint", "save and load")


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_random_programs_equal_a_model_that_recomputes(
    data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "pool.safetensors"
    pool, slots = new_pool().alloc(data.draw(st.integers(0, N - 1)))
    model: dict[int, tuple[int, ...]] = dict.fromkeys(slots.tolist(), ())
    token = st.integers(0, len(VOCABULARY) - 1)
    for _ in range(data.draw(st.integers(1, 10))):
        op = data.draw(st.sampled_from(OPERATIONS))
        live = sorted(model)
        if op == "alloc" and len(live) < N:
            pool, slots = pool.alloc(1)
            model[int(slots[0])] = ()
        elif op == "fork" and live and len(live) < N:
            source = data.draw(st.sampled_from(live))
            pool, slots = pool.fork(source, 1)
            model[int(slots[0])] = model[source]
        elif op == "free" and live:
            slot = data.draw(st.sampled_from(live))
            pool = pool.free(rows(slot))
            del model[slot]
        elif op == "reset" and live:
            slot = data.draw(st.sampled_from(live))
            pool, model[slot] = pool.reset(rows(slot)), ()
        elif op == "save and load":
            gdn.save_pool(path, pool)
            pool = gdn.load_pool(path, CFG)
        elif op == "checkpoint" and live and len(live) < N:
            source = data.draw(st.sampled_from(live))
            kept = pool.checkpoint(source)
            pool, slots = pool.reset(rows(source)).branch(kept, 1)
            model[int(slots[0])], model[source] = model[source], ()
        elif op in ("step", "draft"):
            picked = data.draw(st.permutations([*live, IDLE, IDLE]))[:B]
            tokens = data.draw(st.lists(token, min_size=B * TD, max_size=B * TD))
            grid = np.array(tokens).reshape(B, TD)
            if op == "step":
                y, pool = step(pool, VOCABULARY[grid[:, 0]], rows(*picked), rows(*picked))
                taken = [1] * B
            else:
                scheme = data.draw(st.sampled_from(SCHEMES))
                lengths = data.draw(st.lists(st.integers(0, TD), min_size=B, max_size=B))
                chain = jnp.broadcast_to(jnp.arange(-1, TD - 1), (B, TD))
                ys, record = draft(
                    pool, VOCABULARY[grid], rows(*picked), rows(*lengths), chain, scheme=scheme
                )
                taken = [data.draw(st.integers(0, n)) for n in lengths]
                pool = commit(pool, record, rows(*picked), rows(*taken))
                y = np.stack(
                    [ys[b, n - 1] if n else np.zeros(64, np.float32) for b, n in enumerate(taken)]
                )
            for b, slot in enumerate(picked):
                if slot == IDLE:
                    np.testing.assert_array_equal(y[b], 0)
                else:
                    model[slot] += tuple(map(int, grid[b, : taken[b]]))
                    if taken[b]:
                        assert_same_bits(y[b], recomputed(model[slot])[0])
    for slot, tokens in model.items():
        assert_holds(pool, slot, tokens)
    assert sorted(model) == pool.used.tolist()


def test_a_prefix_is_read_without_being_written() -> None:
    pool, (prefix, branch) = new_pool().alloc(2)
    _, pool = step(pool, VOCABULARY[:2], rows(prefix, IDLE), rows(prefix, IDLE))
    y, pool = step(pool, VOCABULARY[1:3], rows(prefix, IDLE), rows(branch, IDLE))
    assert_holds(pool, int(prefix), (0,))
    assert_holds(pool, int(branch), (0, 1))
    assert_same_bits(y[0], recomputed((0, 1))[0])


def test_other_slots_may_hold_nan() -> None:
    pool, slots = new_pool().alloc(2)
    spoilt = jax.tree.map(lambda x: x, pool)
    for name in ("S", "conv_hist"):
        full = jnp.full_like(getattr(pool, name), jnp.nan)
        kept = full.at[:, slots[0]].set(getattr(pool, name)[:, slots[0]])
        object.__setattr__(spoilt, name, kept)
    y, after = step(spoilt, VOCABULARY[:2], rows(int(slots[0]), IDLE), rows(int(slots[0]), IDLE))
    assert_same_bits(y[0], recomputed((0,))[0])
    np.testing.assert_array_equal(y[1], 0)
    assert_holds(after, int(slots[0]), (0,))
    assert np.isnan(np.delete(np.asarray(after.S), int(slots[0]), axis=1)).all()


def test_a_batch_is_near_its_rows_alone() -> None:
    pool, slots = new_pool().alloc(2)
    ys, _ = step(pool, VOCABULARY[:2], slots, slots)
    for b in range(B):
        solo, _ = BANK.step_slots(pool, LAYER, VOCABULARY[b : b + 1], slots[b : b + 1])
        assert_close(ys[b], solo[0], 1e-6)


def test_bad_slots_and_pools_are_refused() -> None:
    pool, slots = new_pool().alloc(2)
    x = VOCABULARY[:2]

    def refuse(call: Any, *fragments: str, error: type[Exception] = gdn.SlotError) -> None:
        assert_refused(call, *fragments, error=error)

    refuse(lambda: BANK.step_slots(pool, LAYER, x, rows(0, 0)), "every slot once")
    refuse(lambda: BANK.step_slots(pool, LAYER, x, rows(0, 3)), "never handed out")
    refuse(lambda: BANK.step_slots(pool, LAYER, x, rows(0, 4)), "needed 0 to 3")
    refuse(lambda: BANK.step_slots(pool.free(slots), LAYER, x, slots), "was freed")
    refuse(
        lambda: BANK.step_slots(pool, LAYER, x, slots, write_slots=rows(1, 1)), "every slot once"
    )
    other = gdn.StatePool.create(CFG, L + 1, N)
    refuse(lambda: BANK.step_slots(other, LAYER, x, slots), "pool.S", "L=2", error=gdn.ShapeError)
    refuse(lambda: BANK.step_slots(pool, LAYER, x, rows(0)), "slots", "B=2", error=gdn.ShapeError)
    refuse(
        lambda: BANK.draft_slots(pool, 0, x[:, None], slots), "not resident",
        error=gdn.LayerNotResidentError,
    )  # fmt: skip
    refuse(
        lambda: BANK.draft_slots(pool, LAYER, x[:, None][:, :0], slots), "xs has shape (2, 0, 64)",
        "T >= 1", error=gdn.ShapeError,
    )  # fmt: skip
    with pytest.raises(gdn.UnknownNameError, match="no scheme 'undo'"):
        BANK.draft_slots(pool, LAYER, x[:, None], slots, scheme="undo")
