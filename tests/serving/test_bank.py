"""Resident layers: refusal before any change, independence of layers, and bit identities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.report.metrics import unequal
from tests.support.cases import LayerCase, layer_inputs, state_arrays
from tests.support.tools import assert_refused, assert_same_bits, decode, decode_step, layer

CFG = gdn.PRESETS["tiny"]
L, B, T = 3, 2, 4
CASES = [LayerCase(CFG, B, T, live=True, seed=seed) for seed in range(L)]
XS = layer_inputs(CASES[0])[1]

step = jax.jit(gdn.LayerBank.step, static_argnums=2)
run = jax.jit(gdn.LayerBank.decode, static_argnums=2)


def params(layer_index: int) -> gdn.GDNParams:
    return layer(CASES[layer_index])[0]


@functools.cache
def full_bank() -> gdn.LayerBank:
    bank = gdn.LayerBank(CFG, L)
    for i in range(L):
        bank = bank.preload(i, params(i))
    return bank


def live_stack() -> gdn.GDNState:
    return gdn.import_state(state_arrays(CFG, (L, B), 9), CFG)


def part(state: gdn.GDNState, layer_index: int) -> gdn.GDNState:
    return jax.tree.map(lambda x: np.asarray(x)[layer_index], state)


def test_a_layer_that_is_not_resident_is_refused_before_its_state_changes() -> None:
    bank, state = gdn.LayerBank(CFG, L).preload(1, params(1)), live_stack()
    calls = {
        "step": lambda: bank.step(state, 2, jnp.asarray(XS[:, 0])),
        "decode": lambda: bank.decode(state, 2, jnp.asarray(XS)),
        "decode_host": lambda: bank.decode_host(state, 2, XS),
    }
    for name, call in calls.items():
        fragments = (f"LayerBank.{name}", "layer 2 is not resident", "preload(2, params)")
        assert_refused(call, *fragments, error=gdn.LayerNotResidentError)
    assert_same_bits(state, live_stack())


def test_residency_is_checked_under_jit_too() -> None:
    bank = gdn.LayerBank(CFG, L).preload(1, params(1))
    with pytest.raises(gdn.LayerNotResidentError):
        step(bank, live_stack(), 0, XS[:, 0])


def test_preload_returns_a_new_bank_and_leaves_the_old_one() -> None:
    empty = gdn.LayerBank(CFG, L)
    one = empty.preload(2, params(2))
    assert (empty.resident, one.resident) == ((), (2,))
    assert one.preload(0, params(0)).resident == (0, 2)
    with pytest.raises(AttributeError):
        one.num_layers = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_a_refused_preload_leaves_the_bank() -> None:
    bank = gdn.LayerBank(CFG, L)
    other = layer(LayerCase(gdn.PRESETS["tiny-wide"], 1, 1))[0]
    fragments = ("LayerBank.preload", "params.in_proj_qkv", "needed [C=96, D=64]")
    assert_refused(lambda: bank.preload(0, other), *fragments, error=ValueError)
    assert bank.resident == ()


@pytest.mark.parametrize("i", range(L))
def test_a_step_is_the_layers_own_and_touches_no_other(i: int) -> None:
    state = live_stack()
    y, new = step(full_bank(), state, i, XS[:, 0])
    alone = decode_step(params(i), part(state, i), XS[:, 0], CFG)
    assert_same_bits((y, part(new, i)), alone)
    for other in set(range(L)) - {i}:
        assert_same_bits(part(new, other), part(state, other))
    assert unequal(np.asarray(new.S[i]), np.asarray(state.S[i])) == state.S[i].size


def test_decode_is_the_layers_own_run() -> None:
    state = live_stack()
    ys, new = run(full_bank(), state, 2, XS)
    assert_same_bits((ys, part(new, 2)), decode(params(2), part(state, 2), XS, CFG))
    assert_same_bits(part(new, 0), part(state, 0))


def test_the_same_weights_in_two_layers_give_the_same_bits() -> None:
    bank = gdn.LayerBank(CFG, L).preload(0, params(0)).preload(L - 1, params(0))
    state, first, last = bank.init_state(B), [], []
    for t in range(T):
        y, state = step(bank, state, 0, XS[:, t])
        first.append(y)
    for t in range(T):
        y, state = step(bank, state, L - 1, XS[:, t])
        last.append(y)
    assert_same_bits(first, last)
    assert_same_bits(part(state, 0), part(state, L - 1))
    assert not np.any(part(state, 1).S)


def test_host_round_trips_equal_one_device_run() -> None:
    """And leave the state that came in usable, though the step updates its copy in place."""
    for bank, state in (
        (full_bank(), live_stack()),
        (gdn.LayerBank(CFG, 1).preload(0, params(0)), jax.tree.map(lambda x: x[:1], live_stack())),
    ):
        i = bank.num_layers - 1
        before = gdn.export_state(state)
        ys, new = bank.decode_host(state, i, XS)
        assert isinstance(ys, np.ndarray)
        assert_same_bits(gdn.export_state(state), before)
        assert_same_bits((ys, new), run(bank, state, i, XS))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_reset_replays_the_first_tokens(poison: float) -> None:
    """Whatever the layer held; the other layers keep theirs."""
    bank = full_bank()
    fresh = run(bank, bank.init_state(B), 1, XS)
    state = jax.tree.map(lambda x: x.at[1].set(poison), live_stack())
    state = bank.reset(state, 1)
    assert_same_bits(part(state, 0), part(live_stack(), 0))
    assert not np.any(part(state, 1).S)
    ys, again = run(bank, state, 1, XS)
    assert_same_bits((ys, part(again, 1)), (fresh[0], part(fresh[1], 1)))


def test_is_a_pytree_that_keeps_its_gaps() -> None:
    bank = gdn.LayerBank(CFG, L).preload(1, params(1))
    leaves, shape = jax.tree.flatten(bank)
    again = jax.tree.unflatten(shape, leaves)
    assert (again.cfg, again.num_layers, again.resident) == (CFG, L, (1,))
    state = live_stack()
    assert_same_bits(step(again, state, 1, XS[:, 0]), step(full_bank(), state, 1, XS[:, 0]))


def test_donating_the_stack_updates_it_in_place() -> None:
    donating = jax.jit(gdn.LayerBank.step, static_argnums=2, donate_argnums=1)
    state = live_stack()
    expected = step(full_bank(), state, 1, XS[:, 0])
    found = donating(full_bank(), state, 1, XS[:, 0])
    assert state.S.is_deleted()
    assert_same_bits(found, expected)


@pytest.mark.parametrize("index", [-1, L, 1.0, "0", None, True])
def test_no_such_layer(index) -> None:
    bank, state = full_bank(), live_stack()
    calls = (
        lambda: bank.step(state, index, jnp.asarray(XS[:, 0])),
        lambda: bank.decode(state, index, jnp.asarray(XS)),
        lambda: bank.decode_host(state, index, XS),
        lambda: bank.reset(state, index),
        lambda: bank.preload(index, params(0)),
    )
    for call in calls:
        assert_refused(call, "LayerBank.", f"layer is {index!r}", "needed 0 to 2", error=ValueError)


@pytest.mark.parametrize("layers", [0, -1, 1.5, "3", True])
def test_no_such_number_of_layers(layers) -> None:
    assert_refused(
        lambda: gdn.LayerBank(CFG, layers), "num_layers", repr(layers), "positive", error=ValueError
    )


def test_wrong_states_and_inputs() -> None:
    bank, state, x = full_bank(), live_stack(), jnp.asarray(XS[:, 0])
    one, more = jax.tree.map(lambda a: a[0], state), jax.tree.map(lambda a: a[:2], state)
    for call, *fragments in (
        (lambda: bank.step(one, 0, x), "state.S", "needed [L=3, B"),
        (lambda: bank.step(more, 0, x), "state.S has shape (2, 2", "needed [L=3, B"),
        (lambda: bank.reset(one, 0), "state.S", "needed [L=3, B"),
        (lambda: bank.step(state, 0, x[:1]), "x has shape (1, 64)", "needed [B=2, D=64]"),
        (lambda: bank.decode(state, 0, jnp.asarray(XS[:1])), "xs", "needed [B=2, T, D=64]"),
        (lambda: bank.decode_host(state, 0, XS.tolist()), "xs is a list", "numpy array"),
        (lambda: bank.decode_host(state, 0, XS[:, :0]), "xs has shape (2, 0, 64)", "T >= 1"),
        (lambda: bank.decode_host(state, 0, XS.astype(np.float64)), "xs", "float64", "float32"),
        (lambda: bank.init_state(0), "batch is 0", "positive"),
    ):
        assert_refused(call, *fragments, error=ValueError)
