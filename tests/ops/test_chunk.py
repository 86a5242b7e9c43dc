"""The delta rule over chunks against float64, whatever the length, the chunk and the gates."""

import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.ops.chunk_xla import CHUNK_SIZES
from tests.support.chunk_contract import ChunkRule
from tests.support.tools import EPS, assert_close, assert_refused, assert_same_bits

LIMIT = 192 * EPS
"""The sums inside a chunk of 128 and over K of 16, for what is inside and what comes before."""
HK, HV, K, V = 2, 4, 16, 8
NAMES = ("q", "k", "v", "g", "beta")
MIDDLE, ROWS = 130, 2
"""Sizes of what is no matter of size: programs for each are compiled once."""

chunked = jax.jit(gdn.chunk_gated_delta_rule, static_argnames=("chunk_size", "use_qk_l2norm"))


def draw(T: int, B: int = 1, seed: int = 0, **changed: Any) -> dict[str, np.ndarray]:
    """Unit q and k, gates from none to strong, and a live state."""
    rng = np.random.default_rng((seed, T, B))
    q, k = rng.normal(size=(2, B, T, HK, K))
    made = {name: x / np.linalg.norm(x, axis=-1, keepdims=True) for name, x in (("q", q), ("k", k))}
    made |= {"v": rng.normal(size=(B, T, HV, V)), "initial_state": rng.normal(size=(B, HV, K, V))}
    made["g"] = -np.exp(rng.uniform(-9, 3, (B, T, HV)))
    made["beta"] = rng.uniform(0, 1, (B, T, HV))
    return {name: np.asarray(x, np.float32) for name, x in (made | changed).items()}


def exact(drawn: dict[str, np.ndarray], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return oracle.recurrent_gated_delta_rule(**drawn, **options)


def assert_right(drawn: dict[str, np.ndarray], chunk_size: int = 64, limit: float = LIMIT) -> None:
    for found, wanted in zip(chunked(**drawn, chunk_size=chunk_size), exact(drawn), strict=True):
        assert_close(found, wanted, limit)


class TestXla(ChunkRule):
    LIMITS: ClassVar = {"float32": LIMIT, "bfloat16": 2.0**-8 + LIMIT, "hard": LIMIT}

    def run(self, **operands: Any) -> tuple[jax.Array, jax.Array]:
        return chunked(**operands, scale=0.3)


@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 500, 1000, 4096])
def test_every_length(T: int) -> None:
    assert_right(draw(T))


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_every_chunk_size(chunk_size: int) -> None:
    assert_right(draw(MIDDLE, ROWS), chunk_size)


@pytest.mark.parametrize(
    ("T", "B", "cut", "chunk_size"),
    [
        (64, 1, 1, 64),
        (128, 1, 63, 64),
        (128, 1, 64, 64),
        (MIDDLE, ROWS, 65, 16),
        (MIDDLE, ROWS, 65, 32),
    ],
)
def test_split_anywhere_and_go_on(T: int, B: int, cut: int, chunk_size: int) -> None:
    whole = draw(T, B)
    o, S = chunked(**whole, chunk_size=chunk_size)
    first = {n: x[:, :cut] if n in NAMES else x for n, x in whole.items()}
    rest = {n: x[:, cut:] if n in NAMES else x for n, x in whole.items()}
    head, between = chunked(**first, chunk_size=chunk_size)
    tail, after = chunked(**rest | {"initial_state": between}, chunk_size=chunk_size)
    assert_close(jnp.concatenate([head, tail], 1), o, LIMIT)
    assert_close(after, S, LIMIT)


def gates(*values: float, T: int) -> np.ndarray:
    """These gates, the last one repeated."""
    one = np.array([*values, *[values[-1]] * (T - len(values))])
    return np.broadcast_to(one[None, :, None], (ROWS, T, HV))


@pytest.mark.parametrize(
    "g",
    [
        gates(0.0, T=MIDDLE),
        np.where(np.arange(MIDDLE)[None, :, None] % 2, 0.0, gates(-0.1, T=MIDDLE)),
        gates(-27.6, T=MIDDLE),
        gates(-90.0, -1e-3, T=MIDDLE),
        gates(-1e-3, -5000.0, -1e-2, T=MIDDLE),
        gates(-80.0, -1e-4, T=MIDDLE) * (np.arange(MIDDLE) % 32 == 0)[None, :, None] - 1e-4,
    ],
    ids=["none", "every other", "1e-12 a token", "-90 first", "-5000 once", "-80 now and then"],
)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_gates_that_a_difference_of_long_sums_loses(g: np.ndarray, chunk_size: int) -> None:
    assert_right(draw(MIDDLE, ROWS, g=g), chunk_size)


@pytest.mark.parametrize("chunk_size", [64, 128])
def test_repeated_keys_do_not_blow_the_inverse_up(chunk_size: int) -> None:
    k = np.zeros((ROWS, MIDDLE, HK, K))
    k[..., 0] = 1
    one = np.ones((ROWS, MIDDLE, HV))
    drawn = draw(MIDDLE, ROWS, k=k, q=k, g=-1e-3 * one, beta=0.835 * one)
    assert_right(drawn, chunk_size)


@pytest.mark.slow
def test_correlated_queries_and_keys_over_8192_tokens() -> None:
    T, rng = 8192, np.random.default_rng(0)
    common = rng.normal(size=(1, 1, HK, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True)
            for x in common + 0.3 * rng.normal(size=(2, 1, T, HK, K)))  # fmt: skip
    assert 0.85 < np.mean(np.sum(q * k, -1)) < 0.95
    g = rng.uniform(-0.034, -0.012, (1, T, HV))
    assert_right(draw(T, q=q, k=k, g=g, beta=np.ones((1, T, HV))))


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_no_writing_and_full_writing(beta: float) -> None:
    weak = -np.exp(np.random.default_rng(0).uniform(-9, -2, (1, 65, HV)))
    drawn = draw(65, beta=np.full((1, 65, HV), beta), g=weak)
    assert_right(drawn)
    if not beta:
        _, S = chunked(**drawn, chunk_size=64)
        decay = np.exp(drawn["g"].astype(np.float64).sum(1))[..., None, None]
        assert_close(S, drawn["initial_state"] * decay, LIMIT)


def test_zero_keys_and_the_norm() -> None:
    drawn = draw(70)
    drawn["k"][:, 10:20] = 0
    drawn["q"] = 3 * drawn["q"]
    found = chunked(**drawn, use_qk_l2norm=True, scale=0.7)
    for x, wanted in zip(found, exact(drawn, use_qk_l2norm=True, scale=0.7), strict=True):
        assert_close(x, wanted, LIMIT)


def packed(lengths: list[int], seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    T, N = sum(lengths), len(lengths)
    states = np.random.default_rng(seed).normal(size=(N, HV, K, V))
    return draw(T, seed=seed, initial_state=states), np.cumsum([0, *lengths]).astype(np.int32)


def assert_packed(drawn: dict[str, np.ndarray], cu: np.ndarray, chunk_size: int) -> None:
    out = chunked(**drawn, cu_seqlens=jnp.asarray(cu), chunk_size=chunk_size)
    o, S = map(np.asarray, out)
    for i, (start, end) in enumerate(itertools.pairwise(cu)):
        if start == end:
            assert_same_bits(S[i], drawn["initial_state"][i])
            continue
        alone = {n: x[:, start:end] for n, x in drawn.items() if n in NAMES}
        want_o, want_S = exact(alone | {"initial_state": drawn["initial_state"][i : i + 1]})
        assert_close(o[:, start:end], want_o, LIMIT)
        assert_close(S[i : i + 1], want_S, LIMIT)
    assert not np.any(o[:, cu[-1] :])


@pytest.mark.parametrize(
    ("lengths", "T", "chunk_size"),
    [
        ([37, 51, 40, 0, 1], 129, 64),
        ([64, 64, 0, 0, 0], 129, 64),
        ([0, 0, 0, 0, 0], 129, 64),
        # As many chunks as there may be.
        ([*[1] * 8, 17], 25, 16),
        ([0, 0, 5, *[0] * 6], 25, 16),
        ([16, 0, 9, *[0] * 6], 25, 16),
    ],
)
def test_packed_sequences_do_not_see_each_other(
    lengths: list[int], T: int, chunk_size: int
) -> None:
    drawn, cu = packed(lengths)
    assert_packed(drawn | draw(T, initial_state=drawn["initial_state"]), cu, chunk_size)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([16, 32]))
def test_packed_by_any_lengths(lengths: list[int], chunk_size: int) -> None:
    # One shape for all: what is behind the last sequence is nobody's.
    drawn, _ = packed([240])
    lengths = [*lengths, *[0] * (6 - len(lengths))]
    states = np.random.default_rng(1).normal(size=(6, HV, K, V)).astype(np.float32)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    assert_packed(drawn | {"initial_state": states}, cu, chunk_size)


def test_nan_stays_in_its_sequence() -> None:
    drawn, cu = packed([37, 51, 40, 0, 1])
    drawn["v"][:, 37:88] = np.nan
    o, S = chunked(**drawn, cu_seqlens=jnp.asarray(cu), chunk_size=64)
    assert np.isfinite(np.delete(np.asarray(o), np.s_[37:88], axis=1)).all()
    assert np.isfinite(np.asarray(S)[[0, 2, 3, 4]]).all()
    assert np.isnan(S[1]).any()


def loss(rule: Any, drawn: dict[str, jax.Array]) -> jax.Array:
    o, S = rule(**drawn)
    return jnp.sum(jnp.sin(o)) + jnp.sum(S * S)


in_chunks = functools.partial(gdn.chunk_gated_delta_rule, chunk_size=16)
gradients = [
    jax.jit(jax.grad(functools.partial(loss, rule)))
    for rule in (in_chunks, gdn.recurrent_gated_delta_rule)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["drawn", "zero keys", "strong decay", "beta 0", "beta 1", "packed"]
)
def test_gradients_are_those_of_the_recurrent_form(case: str) -> None:
    T = 40
    drawn = draw(T)
    if case == "zero keys":
        drawn["k"][:, ::3] = 0
    elif case == "strong decay":
        drawn["g"][:] = np.where(np.arange(T) % 7, -0.01, -200.0)[None, :, None]
    elif case.startswith("beta"):
        drawn["beta"][:] = float(case[-1])
    if case == "packed":
        drawn, cu = packed([17, 0, 23])
        pair = (
            functools.partial(in_chunks, cu_seqlens=jnp.asarray(cu)),
            functools.partial(one_by_one, cu),
        )
        runs = [jax.jit(jax.grad(functools.partial(loss, rule))) for rule in pair]
    else:
        runs = gradients
    drawn = jax.tree.map(jnp.asarray, drawn)
    found, wanted = (run(drawn) for run in runs)
    for name, x in found.items():
        assert_close(x, np.asarray(wanted[name]), 2e-5, name)


def one_by_one(cu: np.ndarray, initial_state: jax.Array, **tokens: Any) -> Any:
    outs, states = [], []
    for i, (start, end) in enumerate(itertools.pairwise(cu.tolist())):
        state = initial_state[i : i + 1]
        if end > start:
            part = {name: x[:, start:end] for name, x in tokens.items()}
            o, state = gdn.recurrent_gated_delta_rule(**part, initial_state=state)
            outs.append(o)
        states.append(state)
    return jnp.concatenate(outs, 1), jnp.concatenate(states)


@pytest.mark.slow
def test_memory_of_the_backward_pass_is_linear() -> None:
    def nbytes(T: int) -> float:
        heads = {"q": (1, K), "k": (1, K), "v": (3, V), "g": (3,), "beta": (3,)}
        sizes = {name: (1, T, *tail) for name, tail in heads.items()} | {
            "initial_state": (1, 3, K, V)
        }
        drawn = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in sizes.items()}
        gradient = jax.jit(jax.grad(functools.partial(loss, gdn.chunk_gated_delta_rule)))
        analysis: Any = gradient.trace(drawn).lower().compile().memory_analysis()
        return analysis.temp_size_in_bytes / T / 3

    K = V = 128
    short, long = nbytes(256), nbytes(1024)
    assert long <= 1.02 * short
    assert long <= 9.5e3


def test_what_is_refused() -> None:
    drawn: Any = draw(20)

    def refuse(*fragments: str, **options: Any) -> None:
        call = functools.partial(gdn.chunk_gated_delta_rule, **drawn | options)
        assert_refused(call, "chunk_gated_delta_rule", *fragments, error=gdn.ShapeError)

    refuse("chunk_size is 48", "16, 32, 64, 128", chunk_size=48)
    refuse("q", "float32", q=drawn["q"].astype(np.float64))
    ints = functools.partial(np.array, dtype=np.int32)
    refuse("needed B = 1", cu_seqlens=ints([0, 20]), **draw(20, B=2))
    refuse("begin at 0", cu_seqlens=ints([1, 20]))
    refuse("end by 20", cu_seqlens=ints([0, 21]))
    refuse("never go down", cu_seqlens=ints([0, 9, 5]))
    refuse("initial_state", "N=2", cu_seqlens=ints([0, 9, 20]))
    refuse("cu_seqlens", "int32", cu_seqlens=np.array([0.0, 20.0]))
    with pytest.raises(gdn.BackendUnavailableError, match=r"no CUDA GPU.*backend='xla' runs it"):
        gdn.chunk_gated_delta_rule(**drawn, backend="pallas")
