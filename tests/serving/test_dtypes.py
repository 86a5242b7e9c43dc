"""Activations in bfloat16 and float16: float32 inside, rounded once; states do not know of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.serving.drafts import SCHEMES
from tests.support.cases import state_arrays
from tests.support.sequences import BANK, CFG, IDLE, LAYER, B, L, N, rows
from tests.support.tools import assert_refused, assert_same_bits

T = 3
NARROW = ("bfloat16", "float16")
XS = np.random.default_rng(1).normal(size=(B, T, CFG.d_model)).astype(np.float32)
STATE = gdn.import_state(state_arrays(CFG, (L, B), 2), CFG)
POOL = gdn.StatePool.create(CFG, L, N).alloc(N)[0].import_(range(N), state_arrays(CFG, (L, N), 3))
SLOTS = rows(2, 0)
TREE = jnp.asarray([[-1, 0, 0], [-1, -1, 1]], jnp.int32)


@functools.partial(jax.jit, static_argnames=("scheme", "tree"))
def drafted(xs: jax.Array, slots: jax.Array, scheme: str, *, tree: bool = False) -> Any:
    """Outputs and record of a draft, and the pool after two and one of its tokens."""
    parents = TREE if tree else None
    ys, record = BANK.draft_slots(POOL, LAYER, xs, slots, parents=parents, scheme=scheme)
    return ys, record, POOL.commit({LAYER: record}, slots, rows(2, 1))


PROGRAMS = {
    "step": jax.jit(lambda xs: BANK.step(STATE, LAYER, xs[:, 0])),
    "decode": jax.jit(lambda xs: BANK.decode(STATE, LAYER, xs)),
    "decode_host": lambda xs: BANK.decode_host(STATE, LAYER, np.asarray(xs)),
    "step_slots": jax.jit(lambda xs: BANK.step_slots(POOL, LAYER, xs[:, 0], SLOTS)),
    "an idle row": jax.jit(lambda xs: BANK.step_slots(POOL, LAYER, xs[:, 0], rows(IDLE, 3))),
    **{s: functools.partial(drafted, slots=SLOTS, scheme=s) for s in SCHEMES},
    "a tree": functools.partial(drafted, slots=SLOTS, scheme="replay", tree=True),
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", PROGRAMS)
def test_outputs_are_rounded_once_and_nothing_else_is(name: str, dtype: str) -> None:
    narrow = jnp.asarray(XS, dtype)
    y, *held = PROGRAMS[name](narrow)
    wide, *expected = PROGRAMS[name](narrow.astype(jnp.float32))
    assert y.dtype == narrow.dtype
    assert_same_bits(np.asarray(y, np.float32), np.asarray(wide.astype(dtype), np.float32))
    assert {x.dtype for x in jax.tree.leaves(held)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
    assert_same_bits(jax.tree.leaves(held), jax.tree.leaves(expected))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_commit_is_what_steps_leave(scheme: str, dtype: str) -> None:
    xs = jnp.asarray(XS, dtype)
    ys, _, pool = drafted(xs, SLOTS, scheme)
    y, one = PROGRAMS["step_slots"](xs)
    again = jax.jit(lambda pool, x: BANK.step_slots(pool, LAYER, x, SLOTS))
    second, two = again(one, xs[:, 1])
    assert_same_bits([ys[:, 0], ys[0, 1]], [y, second[0]])
    for name in ("S", "conv_hist"):
        held = getattr(pool, name)
        assert_same_bits(held[:, SLOTS[0]], getattr(two, name)[:, SLOTS[0]])
        assert_same_bits(held[:, SLOTS[1]], getattr(one, name)[:, SLOTS[1]])


@pytest.mark.parametrize("dtype", NARROW)
def test_a_pool_of_several_threads_takes_them_too(dtype: str) -> None:
    shared = gdn.SharedPool(gdn.StatePool.create(CFG, L, B))
    slots, xs = shared.alloc(B), jnp.asarray(XS, dtype)
    pool = gdn.StatePool.create(CFG, L, B).alloc(B)[0]
    y, after = jax.jit(lambda pool, x: BANK.step_slots(pool, LAYER, x, slots))(pool, xs[:, 0])
    assert_same_bits(shared.step(BANK, LAYER, xs[:, 0], slots), y)
    ys, record = shared.draft(BANK, LAYER, xs[:, 1:], slots)
    shared.commit({LAYER: record}, slots, rows(0, 0))
    assert ys.dtype == xs.dtype
    assert_same_bits(shared.export(slots), after.export(slots))


def test_other_dtypes_are_refused() -> None:
    wrong = jnp.asarray(XS).astype(jnp.int32)
    for call in (
        lambda: BANK.step(STATE, LAYER, wrong[:, 0]),
        lambda: BANK.decode(STATE, LAYER, wrong),
        lambda: BANK.decode_host(STATE, LAYER, np.asarray(wrong)),
        lambda: BANK.step_slots(POOL, LAYER, wrong[:, 0], SLOTS),
        lambda: BANK.draft_slots(POOL, LAYER, wrong, SLOTS),
    ):
        assert_refused(
            call, "LayerBank.", "int32", "float32 or bfloat16 or float16", error=ValueError
        )
