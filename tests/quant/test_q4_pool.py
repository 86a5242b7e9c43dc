"""Int4 pools: the four residency rules, each seen to refuse, and the memory given back."""

import dataclasses
import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.layer.params import LARGE, SMALL
from tests.support.tools import assert_refused, assert_same_bits

CFG = gdn.PRESETS["tiny"]
KEYS = {"qkv": "q", "z": "z", "out": "o"}
FIELDS: dict[str, str] = dict(zip(LARGE, KEYS.values(), strict=True))


@functools.cache
def params() -> gdn.GDNParams:
    return gdn.init_params(jax.random.key(3), CFG)


@functools.cache
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(4), (1, CFG.d_model))


def int4() -> dict[str, gdn.Q4Array]:
    return {name: gdn.quantize_q4(getattr(params(), name)) for name in LARGE}


def pool() -> gdn.Q4Pool:
    return gdn.Q4Pool({FIELDS[name]: w for name, w in int4().items()})


def small_only() -> gdn.GDNParams:
    return dataclasses.replace(params(), **dict.fromkeys(LARGE))


def small_bank() -> gdn.LayerBank:
    return gdn.LayerBank(CFG, 3).preload_small(1, small_only())


def held(bank: gdn.LayerBank) -> list[int]:
    """The identity of every array that a bank holds, layer by layer."""
    return [id(leaf) for leaf in jax.tree.leaves(bank)]


def test_a_bound_layer_steps_like_one_that_holds_its_int4_weights() -> None:
    bank = small_bank().bind_q4(1, pool(), **KEYS)
    direct = gdn.LayerBank(CFG, 3).preload(1, dataclasses.replace(params(), **int4()))
    assert bank.resident == direct.resident == (1,)
    state = bank.init_state()
    assert_same_bits(bank.step(state, 1, x()), direct.step(state, 1, x()))
    y, _ = gdn.LayerBank(CFG, 3).preload(1, params()).step(state, 1, x())
    assert not np.array_equal(y, bank.step(state, 1, x())[0])


def test_small_tensors_and_binding_come_in_either_order() -> None:
    bound = gdn.LayerBank(CFG, 3).bind_q4(1, pool(), **KEYS)
    assert bound.resident == ()
    state = bound.init_state()
    error = gdn.LayerNotResidentError
    assert_refused(lambda: bound.step(state, 1, x()), "layer 1", "small tensors", error=error)
    assert_refused(
        lambda: small_bank().step(state, 1, x()), "layer 1", "projections", "bind_q4", error=error
    )
    assert bound.preload_small(1, small_only()).resident == (1,)


def test_a_bound_bank_goes_through_jit_as_a_snapshot() -> None:
    matrices = pool()
    bank = small_bank().bind_q4(1, matrices, **KEYS)
    state = bank.init_state()
    step = jax.jit(lambda bank, state, x: bank.step(state, 1, x))
    snapshot = jax.tree.map(lambda leaf: leaf, bank)
    y, _ = step(bank, state, x())
    matrices.clear()
    assert_same_bits(step(snapshot, state, x())[0], y)
    assert_refused(
        lambda: step(bank, state, x()), "cleared or rebuilt", error=gdn.StaleBindingError
    )


@pytest.mark.parametrize("change", ["clear", "rebuild"])
def test_rule_4_an_earlier_binding_is_stale(change: str) -> None:
    matrices = pool()
    bank = small_bank().bind_q4(1, matrices, **KEYS)
    state = bank.init_state()
    if change == "clear":
        matrices.clear()
    else:
        matrices.rebuild(dict(matrices.items()))
    xs = np.asarray(x())[:, None]
    for attempt in (
        lambda: bank.step(state, 1, x()),
        lambda: bank.decode(state, 1, jnp.asarray(xs)),
        lambda: bank.decode_host(state, 1, xs),
    ):
        assert_refused(attempt, "layer 1", "cleared or rebuilt", error=gdn.StaleBindingError)
    assert bank.resident == ()
    assert not np.any(state.S)
    if change == "rebuild":
        assert bank.bind_q4(1, matrices, **KEYS).resident == (1,)


def test_rule_3_float32_into_a_bound_layer_allocates_nothing() -> None:
    bank = small_bank().bind_q4(1, pool(), **KEYS)
    host = jax.tree.map(np.array, params())
    gc.collect()
    before, buffers = held(bank), len(jax.live_arrays())
    error = gdn.TierConflictError
    assert_refused(lambda: bank.preload(1, host), "layer 1", "release(1)", error=error)
    assert len(jax.live_arrays()) == buffers
    assert held(bank) == before
    assert bank.release(1).preload(1, host).resident == (1,)


@pytest.mark.parametrize("tier", ["float32", "int4"])
def test_rule_3_binding_a_layer_that_holds_its_projections(tier: str) -> None:
    full = params() if tier == "float32" else dataclasses.replace(params(), **int4())
    bank = gdn.LayerBank(CFG, 3).preload(1, full)
    before = held(bank)
    error = gdn.TierConflictError
    assert_refused(lambda: bank.bind_q4(1, pool(), **KEYS), "holds its projections", error=error)
    assert held(bank) == before
    assert bank.resident == (1,)


@pytest.mark.parametrize("argument", list(KEYS))
def test_rule_2_every_key_must_exist(argument: str) -> None:
    bank = small_bank()
    before = held(bank)
    keys = KEYS | {argument: "missing"}
    assert_refused(
        lambda: bank.bind_q4(1, pool(), **keys), "'missing'", "the pool has", error=KeyError
    )
    assert held(bank) == before
    assert bank.layers[1].binding is None


@pytest.mark.parametrize("argument", list(KEYS))
def test_rule_2_every_shape_must_match_exactly(argument: str) -> None:
    """Each key in turn names a matrix with one row too many: refused, also for the last one."""
    bank, matrices = small_bank(), dict(pool().items())
    field = dict(zip(KEYS, LARGE, strict=True))[argument]
    rows, width = matrices[KEYS[argument]].shape
    matrices["wide"] = gdn.quantize_q4(np.ones((rows + 1, width), np.float32))
    refused = gdn.Q4Pool(matrices)
    assert_refused(
        lambda: bank.bind_q4(1, refused, **(KEYS | {argument: "wide"})),
        "'wide'",
        str((rows + 1, width)),
        field,
        error=ValueError,
    )
    assert bank.layers[1].binding is None


def test_rule_1_small_tensors_are_all_required() -> None:
    for name in SMALL:
        broken = dataclasses.replace(small_only(), **{name: None})
        assert_refused(lambda p=broken: small_bank().preload_small(1, p), f"params.{name}")


def test_memory_is_given_back() -> None:
    """Only the pool holds the matrices: clearing frees them although a bank is bound to it."""
    matrices = pool()
    bank = small_bank().bind_q4(1, matrices, **KEYS)
    size = matrices.nbytes
    assert size == sum(getattr(params(), name).size for name in LARGE) * 9 // 16
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    matrices.clear()
    gc.collect()
    after = sum(array.nbytes for array in jax.live_arrays())
    assert before - after == size
    assert matrices.nbytes == 0
    assert bank.layers[1].stale


def test_a_bad_pool_changes_nothing() -> None:
    matrices = pool()
    generation = matrices.generation
    good = matrices["q"]
    refused: list[tuple[Any, str]] = [
        ({"q": np.ones((2, 32), np.float32)}, "Q4Array"),
        ({1: good}, "needed text"),
        ([good], "needed a mapping"),
        ({"q": jax.tree.map(lambda leaf: leaf[None], good)}, "q.scales"),
    ]
    for bad, said in refused:
        assert_refused(lambda bad=bad: matrices.rebuild(bad), said, error=ValueError)
        assert_refused(lambda bad=bad: gdn.Q4Pool(bad), said, error=ValueError)
    assert matrices.generation == generation
    assert matrices["q"] is good
    assert_refused(lambda: small_bank().bind_q4(1, {}, **KEYS), "needed gdn_jax.Q4Pool")  # pyright: ignore[reportArgumentType]
