"""Slots of a pool against a plain model that keeps every sequence's arrays, bit for bit."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.serving.pool import check_pool
from gdn_jax.serving.table import SlotTable
from tests.support.cases import Arrays
from tests.support.pool_model import CFG, L, N, assert_holds, filled, many, poisoned, refused
from tests.support.tools import assert_refused, assert_same_bits


def test_a_new_pool_is_zeros_and_free() -> None:
    pool = gdn.StatePool.create(CFG, L, N)
    assert (pool.S.shape, pool.conv_hist.shape) == ((3, 6, 4, 16, 8), (3, 6, 3, 96))
    assert (pool.S.dtype, pool.conv_hist.dtype) == (jnp.float32, jnp.float32)
    assert not np.any(pool.S)
    assert not np.any(pool.conv_hist)
    assert (pool.num_layers, pool.num_slots, pool.occupancy) == (L, N, 0)
    assert pool.nbytes == 4 * 3 * 6 * (4 * 16 * 8 + 3 * 96)


def test_5000_slots_of_27b_have_their_size_without_being_allocated() -> None:
    cfg = gdn.PRESETS["qwen3.5-27b"]
    pool = jax.eval_shape(lambda: gdn.StatePool.create(cfg, 48, 5000))
    assert pool.nbytes == 5000 * (150_994_944 + 5_898_240)


@pytest.mark.parametrize("donate", [False, True])
def test_a_recycled_slot_starts_from_zeros(donate: bool) -> None:
    pool = poisoned(filled(N).free([4]), [])
    pool, slots = pool.alloc(1, donate=donate)
    assert slots.dtype == jnp.int32
    assert slots.tolist() == [4]
    assert_same_bits(jax.tree.leaves(pool.export(slots)), jax.tree.leaves(many([0])))


def test_reset_forgets_nan() -> None:
    pool = poisoned(filled(3), [0, 2]).reset(1)
    assert_holds(pool, {0: 1, 1: 0, 2: 3})


@pytest.mark.parametrize("donate", [False, True])
def test_calls_of_three_slots_leave_a_full_pool_otherwise_alone(donate: bool) -> None:
    """Three are not a power of two, which the compiled programs take."""
    kept = {3: 4, 4: 5, 5: 6}
    pool = filled(N).reset([0, 1, 2], donate=donate)
    assert_holds(pool, {0: 0, 1: 0, 2: 0} | kept)
    pool = pool.copy([3, 4, 3], [1, 0, 2], donate=donate)
    assert_holds(pool, {0: 5, 1: 4, 2: 4} | kept)
    pool, slots = pool.free([0, 1, 2]).fork(3, 3, donate=donate)
    assert sorted(slots.tolist()) == [0, 1, 2]
    assert_holds(pool, {0: 4, 1: 4, 2: 4} | kept)
    assert_holds(pool.free(slots).alloc(3, donate=donate)[0], {0: 0, 1: 0, 2: 0} | kept)


def test_a_freed_slot_waits_until_all_others_were_used() -> None:
    """So that a stale number stays an error for as long as it can."""
    pool, slots = gdn.StatePool.create(CFG, 1, 4).alloc(2)
    pool = pool.free(slots[1]).free(slots[:1])
    handed_out = []
    for _ in range(4):
        pool, new = pool.alloc(1)
        handed_out += new.tolist()
    assert handed_out == [2, 3, 1, 0]


def test_the_order_survives_the_end_of_int32() -> None:
    last = np.iinfo(np.int32).max
    table = SlotTable(np.array([1, 2, 2, 4], np.int32), np.array([0, last, 7, 3], np.int32))
    table, slots = table.free("free", np.array([0])).alloc("alloc", 4)
    assert slots.tolist() == [3, 2, 1, 0]
    wrapped = SlotTable(np.full(1, last, np.int32), np.zeros(1, np.int32)).free("", np.array([0]))
    assert not wrapped.used.any()
    assert wrapped.alloc("alloc", 1)[0].used.all()


def test_generations_tell_two_owners_of_one_slot_apart() -> None:
    pool, slots = gdn.StatePool.create(CFG, 1, 1).alloc(1)
    first = pool.generation(slots)
    pool.check(slots, generation=first)
    pool, again = pool.free(slots).alloc(1)
    assert again.tolist() == slots.tolist()
    pool.check(slots)
    call = lambda p: p.check(slots, generation=first)  # noqa: E731
    refused(pool, call, "slots[0] is 0 of generation 1", "freed since", "at 3")
    refused(pool, lambda p: p.check(slots, generation=[1, 3]), "generation has shape (2,)", "(1,)")


def test_copy_reads_everything_before_it_writes() -> None:
    for donate in (False, True):
        pool = filled(5).copy([0, 1, 2], [1, 2, 0], donate=donate)
        assert_holds(pool, {0: 3, 1: 1, 2: 2, 3: 4, 4: 5})
        assert_holds(pool.copy(4, [0, 1, 3], donate=donate), {0: 5, 1: 5, 2: 2, 3: 5, 4: 5})


def test_export_is_what_a_stack_of_the_same_batch_exports() -> None:
    pool = filled(4)
    arrays = pool.export([3, 0, 3])
    assert_same_bits(jax.tree.leaves(arrays), jax.tree.leaves(many([4, 1, 4])))
    state = gdn.import_state(arrays, CFG)
    assert state.S.shape == (L, 3, 4, 16, 8)
    arrays["S"][...] = 7.0
    assert_holds(pool, {0: 1, 1: 2, 2: 3, 3: 4})
    assert_same_bits(jax.tree.leaves(pool.export([])), [x[:, :0] for x in many([1]).values()])


SLOT_METHODS: dict[str, Callable] = {
    "free": lambda pool, slots: pool.free(slots),
    "reset": lambda pool, slots: pool.reset(slots, donate=True),
    "copy": lambda pool, slots: pool.copy(0, slots, donate=True),
    "import_": lambda pool, slots: pool.import_(slots, many([1] * np.size(slots)), donate=True),
    "check": lambda pool, slots: pool.check(slots),
}


@pytest.mark.parametrize("method", SLOT_METHODS)
def test_slots_that_are_refused(method: str) -> None:
    pool = filled(4).free([2])
    for slots, said in [
        ([0, 2], ("[1] is 2", "was freed", "needed slots in use")),
        ([5], ("[0] is 5", "was never handed out", "needed slots in use")),
        ([0, 1, 6], ("[2] is 6", "needed 0 to 5")),
        ([-1], ("[0] is -1", "needed 0 to 5")),
        ([1, 0, 1], ("[2] is 1", "[0]", "needed every slot once")),
        (np.array([0.0, 1.0]), ("float64", "needed int32")),
        (np.array([[0, 1]]), ("shape (1, 2)", "needed int32 [n]")),
        (np.array([True]), ("bool", "needed int32")),
    ]:
        call = functools.partial(SLOT_METHODS[method], slots=slots)
        refused(pool, call, f"StatePool.{method}", *said)


def test_other_refusals() -> None:
    pool = filled(4).free(2)
    full = gdn.PoolFullError
    for donate in (False, True):
        alloc = lambda p, d=donate: p.alloc(4, donate=d)  # noqa: E731
        refused(pool, alloc, "alloc", "3 of 6 slots are free", "needed 4", error=full)
        fork = lambda p, d=donate: p.fork(0, 4, donate=d)  # noqa: E731
        refused(pool, fork, "fork", "3 of 6 slots are free", "needed 4", error=full)
        refused(pool, lambda p, d=donate: p.fork(2, 4, donate=d), "slot[0] is 2", "freed")
        refused(pool, lambda p, d=donate: p.copy([0, 2], [1, 3], donate=d), "src[1] is 2")
    refused(pool, lambda p: p.copy([0, 1, 3], [0, 1]), "src has shape (3,)", "(2,)")
    refused(pool, lambda p: p.fork([0, 1], 1), "slot has shape (2,)", "needed one slot")
    refused(pool, lambda p: p.export([2]), "slots[0] is 2", "freed")
    for n in (-1, 1.0, True, "2"):
        refused(pool, lambda p, n=n: p.alloc(n), "n is", "needed a whole number")
    arrays = many([1, 2])
    wrong: list[tuple[Arrays, tuple[str, ...]]] = [
        ({"S": arrays["S"]}, ("no conv_hist", "found S")),
        (arrays | {"S": np.swapaxes(arrays["S"], -1, -2)}, ("S has shape", "K=16, V=8")),
        (arrays | {"S": arrays["S"][:, :1]}, ("S has shape", "n=2")),
        (arrays | {"S": arrays["S"].astype(np.float16)}, ("float16", "needed", "float32")),
        (arrays | {"conv_hist": arrays["conv_hist"] * np.float32(np.inf)}, ("finite",)),
    ]
    for bad, said in wrong:
        call = lambda p, bad=bad: p.import_([0, 1], bad, donate=True)  # noqa: E731
        refused(pool, call, "import_", *said, error=gdn.ShapeError)
    create: Callable = gdn.StatePool.create
    for n in (0, -1, True, 2.0):
        assert_refused(functools.partial(create, CFG, n, 2), "num_layers is", "positive integer")
        assert_refused(functools.partial(create, CFG, 2, n), "num_slots is", "positive integer")
    assert_refused(lambda: create(None, 1, 1), "NoneType", "GDNConfig")


def test_a_pool_that_does_not_fit_its_configuration() -> None:
    pool = filled(1)
    check_pool("step", pool, CFG, L)
    assert_refused(lambda: check_pool("step", pool.S), "step", "StatePool")
    assert_refused(lambda: check_pool("step", pool, CFG, 2), "pool.S", "(3, 6, 4, 16, 8)", "L=2")
    short = dataclasses.replace(pool, conv_hist=pool.conv_hist[:, 1:])
    assert_refused(lambda: check_pool("step", short), "pool.conv_hist", "(3, 5, 3, 96)", "N=6")
    other = dataclasses.replace(pool, table=SlotTable.create(5))
    assert_refused(lambda: check_pool("step", other), "pool.table.generation", "N=6")
    wide = gdn.PRESETS["tiny-wide"]
    assert_refused(lambda: check_pool("step", pool, wide, L), "pool is of", "d_model=64", "needed")


@pytest.mark.parametrize("donate", [False, True])
def test_donation_is_asked_for_and_in_place(donate: bool) -> None:
    calls: list[Callable[[gdn.StatePool], object]] = [
        lambda p: p.alloc(1, donate=donate),
        lambda p: p.reset([0, 1], donate=donate),
        lambda p: p.fork(1, 2, donate=donate),
        lambda p: p.copy(0, 1, donate=donate),
        lambda p: p.import_([0, 1], many([1, 2]), donate=donate),
    ]
    for call in calls:
        pool = filled(2)
        place = pool.S.unsafe_buffer_pointer()
        after = call(pool)
        new = after[0] if isinstance(after, tuple) else after
        assert isinstance(new, gdn.StatePool)
        assert pool.S.is_deleted() == pool.conv_hist.is_deleted() == donate
        assert (new.S.unsafe_buffer_pointer() == place) == donate
    pool = filled(2)
    assert pool.free([0]).S is pool.S


def test_a_step_is_traced_once_whatever_is_handed_out_meanwhile() -> None:
    """And its result has the table of the call, not of the trace."""
    traced = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pool: gdn.StatePool, slot: jax.Array) -> gdn.StatePool:
        traced.append(pool)
        return dataclasses.replace(pool, S=pool.S.at[:, slot].set(0.0))

    pool, model = filled(2), {0: 1, 1: 2}
    for round_ in range(3):
        pool, branch = pool.fork(1, 1 + round_ % 2)
        model |= dict.fromkeys(branch.tolist(), 2)
        pool = step(pool, jnp.asarray(0))
        model[0] = -1
        assert list(pool.used) == sorted(model)
        pool = pool.reset(0)
        model[0] = 0
        assert_holds(pool, model)
        idle = (set(range(N)) - model.keys()).pop()
        refused(pool, lambda p, idle=idle: p.reset(idle), f"slots[0] is {idle}")
        pool = pool.free(branch)
        for slot in branch.tolist():
            del model[slot]
    assert len(traced) == 1


def test_reset_and_copy_work_under_jit_and_skip_idle_rows() -> None:
    pool = poisoned(filled(N).free([4]), [0, 1, 2, N - 1])
    reset = jax.jit(lambda pool, slots: pool.reset(slots))
    copy = jax.jit(lambda pool, src, dst: pool.copy(src, dst))
    ids = functools.partial(jnp.asarray, dtype=jnp.int32)
    kept = {2: 3, N - 1: N}
    pool = copy(pool, ids([0, -1, N, 1]), ids([3, 0, 1, -1]))
    assert_holds(pool, {0: 1, 1: 2, 3: 1} | kept)
    pool = reset(pool, ids([1, -1, N]))
    assert_holds(pool, {0: 1, 1: 0, 3: 1} | kept)
    carried, _ = jax.lax.scan(lambda p, slot: (p.reset(slot), None), pool, ids([0, -1]))
    assert_holds(carried, {0: 0, 1: 0, 3: 1} | kept)
    for call in (
        lambda p: p.alloc(1),
        lambda p: p.free(0),
        lambda p: p.fork(0, 1),
        lambda p: p.occupancy,
    ):
        refused(pool, lambda p, call=call: jax.jit(call)(p), "traced", "outside jit")
