"""What holds for the layer whatever the numbers: causality, independence, transformations."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import gdn_jax as gdn
from tests.support.cases import LAYER, LayerCase, layer_inputs
from tests.support.tools import (
    MAX_REL,
    assert_close,
    assert_same_bits,
    decode,
    decode_step,
    layer,
    max_rel,
)

CFG = LAYER["tiny"].cfg
CASE = LayerCase(CFG, 3, 4, live=True, seed=5)
PARAMS, STATE, _ = layer(CASE)
XS = layer_inputs(CASE)[1]
YS, END = jax.tree.map(np.asarray, decode(PARAMS, STATE, XS, CFG))


def take(tree, rows):
    """Rows of the batch, on the host."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], tree)


@given(cut=st.integers(1, CASE.T - 1))
def test_split_anywhere_and_continue(cut: int) -> None:
    head, middle = decode(PARAMS, STATE, XS[:, :cut], CFG)
    tail, end = decode(PARAMS, middle, XS[:, cut:], CFG)
    assert_same_bits((np.concatenate([head, tail], axis=1), end), (YS, END))


@given(t=st.integers(1, CASE.T - 1), row=st.integers(0, CASE.B - 1), seed=st.integers(0, 99))
def test_a_later_token_changes_no_earlier_output(t: int, row: int, seed: int) -> None:
    changed = XS.copy()
    changed[row, t:] = np.random.default_rng(seed).standard_normal(CFG.d_model)
    ys = np.asarray(decode(PARAMS, STATE, changed, CFG)[0])
    assert_same_bits(ys[:, :t], YS[:, :t])
    assert max_rel(ys[row, t], YS[row, t]) > 1e-2


@given(rows=st.permutations(range(CASE.B)))
def test_rows_permute(rows: list[int]) -> None:
    ys, end = decode(PARAMS, take(STATE, rows), XS[rows], CFG)
    assert_same_bits((ys, end), (YS[rows], take(END, rows)))


@given(
    row=st.integers(0, CASE.B - 1),
    where=st.sampled_from(["x", "S", "conv_hist"]),
    value=st.sampled_from([np.nan, np.inf, 1e30]),
)
def test_a_row_does_not_see_its_neighbours(row: int, where: str, value: float) -> None:
    xs, state = XS.copy(), {name: x.copy() for name, x in gdn.export_state(STATE).items()}
    spoilt = xs if where == "x" else state[where]
    spoilt[row] = value
    ys, end = decode(PARAMS, gdn.GDNState(*map(jnp.asarray, state.values())), xs, CFG)
    others = [b for b in range(CASE.B) if b != row]
    assert_same_bits(take((ys, end), others), take((YS, END), others))
    assert not np.array_equal(np.asarray(ys)[row], YS[row])


def test_a_row_alone_agrees_with_the_row_in_a_batch() -> None:
    """Not in every bit: how a sum over D is cut up depends on the number of rows."""
    ys, end = decode(PARAMS, take(STATE, [1]), XS[1:2], CFG)
    assert_close(ys, YS[1:2], MAX_REL["layer"])
    assert_close(end.S, take(END, [1]).S, MAX_REL["layer"])


def test_under_vmap_over_layers() -> None:
    """Two layers' weights, states and inputs along an extra leading axis."""
    other = layer(LayerCase(CFG, 3, 4, live=True, seed=6))
    stacked = jax.tree.map(lambda a, b: np.stack([a, b]), (PARAMS, STATE, XS[:, 0]), (
        *other[:2], other[2][:, 0]
    ))  # fmt: skip
    over = jax.jit(jax.vmap(lambda p, s, x: gdn.decode_step(p, s, x, CFG)))(*stacked)
    for i in (0, 1):
        params, state, x = jax.tree.map(lambda a, i=i: a[i], stacked)
        for found, one in zip(
            jax.tree.leaves(over), jax.tree.leaves(decode_step(params, state, x, CFG)), strict=True
        ):
            assert_close(found[i], one, MAX_REL["layer"])


def test_in_a_scan_of_the_caller() -> None:
    def body(state, x):
        y, state = gdn.decode_step(PARAMS, state, x, CFG)
        return state, y

    end, ys = jax.jit(lambda s, xs: jax.lax.scan(body, s, xs))(STATE, np.swapaxes(XS, 0, 1))
    assert_same_bits((np.swapaxes(ys, 0, 1), end), (YS, END))


def test_the_state_that_came_in_is_untouched() -> None:
    before = gdn.export_state(STATE)
    decode_step(PARAMS, STATE, XS[:, 0], CFG)
    decode(PARAMS, STATE, XS, CFG)
    assert_same_bits(gdn.export_state(STATE), before)


def test_donation_updates_in_place_and_changes_no_bit() -> None:
    donating = jax.jit(gdn.decode, static_argnames="cfg", donate_argnames="state")
    given_up = gdn.clone_state(STATE)
    ys, end = donating(PARAMS, given_up, XS, CFG)
    assert given_up.S.is_deleted()
    assert given_up.conv_hist.is_deleted()
    assert not STATE.S.is_deleted()
    assert_same_bits((ys, end), (YS, END))
