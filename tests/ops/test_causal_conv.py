"""The causal convolution over T tokens against plain float64 sums, and against the step."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_jax.layer import steps
from tests.support.tools import MAX_REL, assert_close, assert_same_bits, causal_conv1d

B, C = 2, 12
WIDTHS = (2, 3, 4)
one_step = jax.jit(steps.causal_conv)


def draw(T: int, W: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (B, T, C), (B, W - 1, C), (C, W)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("T", [1, 2, 6])
def test_every_output_and_the_history(T: int, W: int) -> None:
    """T = 1 and 2 are shorter than a history of 3: its frames are shifted, not overwritten."""
    x, hist, weight = draw(T, W)
    out, new = causal_conv1d(x, hist, weight)
    expected = np.empty((B, T, C))
    for t in range(T):
        for c in range(C):
            acc = np.zeros(B)
            for j in range(W):
                place = t + j - (W - 1)
                entry = x[:, place, c] if place >= 0 else hist[:, place, c]
                acc += entry.astype(np.float64) * weight[c, j]
            expected[:, t, c] = acc / (1 + np.exp(-acc))
    assert_close(out, expected, MAX_REL["elementwise"])
    frames = [hist[:, i] for i in range(W - 1)] + [x[:, t] for t in range(T)]
    np.testing.assert_array_equal(new, np.stack(frames[-(W - 1) :], axis=1))


@pytest.mark.parametrize("W", WIDTHS)
def test_equals_the_step_bit_for_bit(W: int) -> None:
    x, hist, weight = draw(6, W)
    out, new = causal_conv1d(x, hist, weight)
    for t in range(6):
        y, hist = one_step(x[:, t], hist, weight)
        assert_same_bits(y, out[:, t])
    assert_same_bits(hist, new)


@given(cut=st.integers(1, 5), W=st.sampled_from(WIDTHS), seed=st.integers(0, 99))
def test_split_anywhere_and_continue(cut: int, W: int, seed: int) -> None:
    x, hist, weight = draw(6, W, seed)
    out, new = causal_conv1d(x, hist, weight)
    head, middle = causal_conv1d(x[:, :cut], hist, weight)
    tail, end = causal_conv1d(x[:, cut:], middle, weight)
    assert_same_bits((np.concatenate([head, tail], axis=1), end), (out, new))


@given(t=st.integers(1, 5), c=st.integers(0, C - 1), row=st.integers(0, B - 1))
def test_nan_reaches_only_later_tokens_of_its_channel(t: int, c: int, row: int) -> None:
    x, hist, weight = draw(6, 4)
    spoilt = x.copy()
    spoilt[row, t, c] = np.nan
    out, _ = causal_conv1d(x, hist, weight)
    bad, _ = causal_conv1d(spoilt, hist, weight)
    expected = np.zeros((B, 6, C), bool)
    expected[row, t : t + 4, c] = True
    np.testing.assert_array_equal(np.isnan(bad), expected)
    assert_same_bits(np.asarray(bad)[~expected], np.asarray(out)[~expected])
