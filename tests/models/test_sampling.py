"""The choice of tokens against plain NumPy, and what it may depend on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn_jax as gdn
from gdn_jax.models.generation import sampling
from gdn_jax.models.generation.sampling import Sampling, choose
from tests.support.tools import assert_refused

V = 40
choose_jitted = jax.jit(choose)
largest, most_probable = map(jax.jit, (sampling.largest, sampling.most_probable))


def draw(seed: int, B: int = 2, *, coarse: bool = False) -> np.ndarray:
    """Logits of both signs; coarse ones have many ties."""
    x = 3 * np.random.default_rng(seed).normal(size=(B, V))
    return (np.round(x) if coarse else x).astype(np.float32)


def numpy_largest(x: np.ndarray, k: int) -> np.ndarray:
    bound = np.sort(x)[-min(k, V)]
    return np.where(x >= bound, x, -np.inf)


def numpy_most_probable(x: np.ndarray, p: float) -> np.ndarray:
    shares = np.exp(x.astype(np.float64) - x.max())
    shares /= shares.sum()
    order = np.argsort(-x, kind="stable")
    n = int(np.searchsorted(np.cumsum(shares[order]), p - 1e-9)) + 1
    return np.where(x >= x[order[min(n, V) - 1]], x, -np.inf)


@given(st.integers(0, 1000), st.sampled_from([1, 2, 7, V, V + 5]), st.booleans())
def test_the_largest(seed: int, k: int, coarse: bool) -> None:
    x = draw(seed, coarse=coarse)
    wanted = [numpy_largest(row, k) for row in x]
    np.testing.assert_array_equal(largest(jnp.asarray(x), jnp.int32(k)), wanted)


@given(st.integers(0, 1000), st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999]), st.booleans())
def test_the_most_probable(seed: int, p: float, coarse: bool) -> None:
    x = draw(seed, coarse=coarse)
    wanted = [numpy_most_probable(row, p) for row in x]
    np.testing.assert_array_equal(most_probable(jnp.asarray(x), jnp.float32(p)), wanted)


def test_edges() -> None:
    x = jnp.asarray([[1.0, 3.0, 3.0, -1.0, -jnp.inf]])

    def left(y: jax.Array) -> list[int]:
        return np.flatnonzero(np.isfinite(y[0])).tolist()

    assert left(most_probable(x, jnp.float32(1e-7))) == [1, 2]
    assert left(most_probable(x.at[0, 1].set(3.5), jnp.float32(1e-7))) == [1]
    assert left(most_probable(x, jnp.float32(1.0))) == [0, 1, 2, 3]
    assert left(largest(x, jnp.int32(1))) == [1, 2]
    assert left(largest(x, jnp.int32(3))) == [0, 1, 2]
    zeros = jnp.asarray([[0.0, -0.0, -1.0]])
    assert left(largest(zeros, jnp.int32(1))) == [0, 1]


def test_seen_tokens_are_less_likely_whatever_their_sign() -> None:
    x = jnp.asarray([[2.0, -2.0, 1.0, -1.0]])
    seen = jnp.asarray([[True, True, False, False]])
    y = sampling.penalised(x, seen, jnp.float32(2))
    np.testing.assert_array_equal(y, [[1.0, -4.0, 1.0, -1.0]])


def chosen(x: np.ndarray, rows: Any, positions: Any, **settings: Any) -> tuple[Any, Any]:
    seen = jnp.zeros(x.shape, bool).at[:, 0].set(True)
    at = (jnp.asarray(a, jnp.int32) for a in (rows, positions))
    return choose_jitted(jnp.asarray(x), Sampling.of(**settings), *at, seen)


def test_greedy_takes_the_first_of_the_largest_with_its_own_probability() -> None:
    x = draw(3)
    x[0, [5, 9]] = 20.0
    tokens, found = chosen(x, [0, 1], [0, 0], top_k=3, top_p=0.2)
    assert tokens.tolist() == [5, int(x[1].argmax())]
    wanted = x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, wanted[[0, 1], np.asarray(tokens)], atol=2e-6)
    # The penalty changes the choice, not the probability that is told.
    x[:, 0] = x.max(axis=1) + np.asarray([0.1, 9.0], np.float32)
    tokens, found = chosen(x, [0, 1], [0, 0], repetition_penalty=1.2)
    assert tokens.tolist() == [5, 0]
    wanted = x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, wanted[[0, 1], np.asarray(tokens)], atol=2e-6)


def test_samples_have_the_distribution_of_what_is_left() -> None:
    x = draw(1, 1)[:, :6]
    many = 20_000
    draws = functools.partial(Sampling.of, temperature=1.5, top_k=5, top_p=0.95, seed=7)
    rows, logits = jnp.zeros(many, jnp.int32), jnp.broadcast_to(jnp.asarray(x), (many, 6))
    tokens, _ = choose_jitted(logits, draws(), rows, jnp.arange(many, dtype=jnp.int32), None)
    hot = numpy_most_probable(numpy_largest(x[0] / 1.5, 5), 0.95)
    wanted = np.exp(hot) / np.exp(hot).sum()
    found = np.bincount(np.asarray(tokens), minlength=6) / many
    # Four standard deviations of a share near one half.
    assert np.abs(found - wanted).max() <= 4 * 0.5 / many**0.5
    assert (found[wanted == 0] == 0).all()


def test_a_row_depends_on_seed_row_and_position_alone() -> None:
    x = np.broadcast_to(draw(5, 1), (4, V))
    settings = dict(temperature=3.0, seed=11)
    tokens, _ = chosen(x, [0, 1, 2, 3], [4, 4, 4, 4], **settings)
    other, _ = chosen(x[:2], [3, 1], [4, 4], **settings)
    assert other.tolist() == [tokens[3], tokens[1]]
    noises = [
        tuple(np.asarray(chosen(x, rows, positions, temperature=30.0, seed=seed)[0]).tolist())
        for rows, positions, seed in (
            ([0, 1, 2, 3], [4, 4, 4, 4], 11),
            ([4, 5, 6, 7], [4, 4, 4, 4], 11),
            ([0, 1, 2, 3], [5, 5, 5, 5], 11),
            ([0, 1, 2, 3], [4, 4, 4, 4], 12),
        )
    ]
    assert len(set(noises)) == 4


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("temperature", -1.0, "from 0 up"),
        ("temperature", float("nan"), "from 0 up"),
        ("temperature", float("inf"), "from 0 up"),
        ("top_k", -1, "whole number from 0 up"),
        ("top_k", 1.5, "whole number from 0 up"),
        ("top_p", 0.0, "above 0, up to 1"),
        ("top_p", 1.1, "above 0, up to 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("seed", -1, "from 0 to"),
        ("seed", 2**32, "from 0 to"),
    ],
)
def test_settings_out_of_range(name: str, value: Any, needed: str) -> None:
    text = f"{name} is {value!r}; needed a"
    assert_refused(lambda: Sampling.of(**{name: value}), text, needed, error=gdn.GenerationError)
