"""The ragged slot interface against float64, each row as a sequence of its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.report.metrics import unequal
from tests.support.tools import MAX_REL, assert_close, assert_refused

HK, HV, K, V, W, N = 2, 4, 16, 8, 4, 9
C = 2 * HK * K + HV * V
LENGTHS = (1, 0, 5, 70, 1, 3, 2)
SLOTS = (4, 7, 2, 0, 8, -1, 5)
FRESH = (3, 5)
"""Rows without an initial state; what lies in slot 0, of the first of them, is NaN."""
T = sum(LENGTHS) + 6

run = jax.jit(gdn.ragged_gated_delta_rule, static_argnames=("chunk_size", "max_query_len"))


def drawn(T: int = T, seed: int = 0) -> dict[str, np.ndarray]:
    """Arguments by name, float32, with NaN wherever nothing may be read."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    tokens = dict(mixed_qkv=normal(T, C), b=normal(T, HV), a=normal(T, HV))
    states = dict(conv_state=normal(N, W - 1, C), recurrent_state=normal(N, HV, K, V))
    for x in states.values():
        x[[0, 1]] = np.nan
    weights = dict(
        conv_weight=normal(C, W) / 2, A_log=normal(HV) / 2, dt_bias=normal(HV) - np.float32(3)
    )
    return {**tokens, **states, **weights}


def rows(lengths: Any = LENGTHS, slots: Any = SLOTS, fresh: Any = FRESH) -> dict[str, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    initial = np.array([i not in fresh for i in range(len(lengths))])
    return dict(
        query_start_loc=starts,
        state_indices=np.asarray(slots, np.int32),
        has_initial_state=initial,
    )


def blank(arrays: dict[str, np.ndarray], which: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tokens of idle rows and those behind the last row are NaN."""
    at = which["query_start_loc"]
    dead = np.arange(len(arrays["mixed_qkv"])) >= at[-1]
    for r in np.flatnonzero(which["state_indices"] < 0):
        dead[at[r] : at[r + 1]] = True
    tokens = {n: arrays[n].copy() for n in ("mixed_qkv", "b", "a")}
    for x in tokens.values():
        x[dead] = np.nan
    return {**arrays, **tokens}


def reference(arrays: dict[str, np.ndarray], which: dict[str, np.ndarray]) -> tuple[Any, ...]:
    """Outputs and both states in float64; NaN stays where nothing is written."""
    w = {name: oracle.wide(x) for name, x in arrays.items()}
    hist_pool, pool = w["conv_state"].copy(), w["recurrent_state"].copy()
    at, slots = which["query_start_loc"], which["state_indices"]
    out = np.zeros((len(w["mixed_qkv"]), HV, V))
    for r in np.flatnonzero((np.diff(at) > 0) & (slots >= 0)):
        S, hist = pool[slots[r]], hist_pool[slots[r]]
        if not which["has_initial_state"][r]:
            S, hist = np.zeros_like(S), np.zeros_like(hist)
        for t in range(at[r], at[r + 1]):
            window = np.concatenate([hist, w["mixed_qkv"][t][None]])
            conv = oracle.silu(np.sum(window * w["conv_weight"].T, axis=0))
            q, k, v = np.split(conv, [HK * K, 2 * HK * K])
            q, k = (oracle.l2_normalise(x.reshape(HK, K)) for x in (q, k))
            g = -np.exp(w["A_log"]) * oracle.softplus(w["a"][t] + w["dt_bias"])
            beta = oracle.sigmoid(w["b"][t])
            out[t], S = oracle.delta_rule(q * K**-0.5, k, v.reshape(HV, V), g, beta, S)
            hist = window[1:]
        pool[slots[r]], hist_pool[slots[r]] = S, hist
    return out, hist_pool, pool


def assert_right(found: Any, arrays: Any, which: Any, limit: float) -> None:
    """Outputs and written slots within ``limit``; every other slot bit for bit as it was."""
    expected = reference(arrays, which)
    assert_close(found[0].astype(jnp.float32), expected[0], limit, "o")
    written = which["state_indices"][np.diff(which["query_start_loc"]) > 0]
    written = written[written >= 0]
    others = np.setdiff1d(np.arange(N), written)
    for i, name in ((1, "conv_state"), (2, "recurrent_state")):
        new, before = np.asarray(found[i]), np.asarray(arrays[name])
        assert new.dtype == before.dtype
        assert_close(new[written].astype(np.float32), expected[i][written], MAX_REL["layer"], name)
        assert unequal(new[others], before[others]) == 0, name


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_rows_of_every_length_agree_with_float64(chunk_size: int) -> None:
    which = rows()
    arrays = blank(drawn(), which)
    found = run(**arrays, **which, chunk_size=chunk_size)
    assert_right(found, arrays, which, MAX_REL["layer"])


def test_one_token_a_row_takes_the_recurrent_rule() -> None:
    """With idle rows, rows without a token and more places than rows; chunks agree."""
    which = rows((1, 0, 1, 1, 1, 0), (4, 7, -1, 0, 8, -1), fresh=(3,))
    arrays = blank(drawn(8), which)
    found = run(**arrays, **which, max_query_len=1)
    assert_right(found, arrays, which, MAX_REL["layer"])
    chunks = run(**arrays, **which)
    traced = [run.trace(**arrays, **which, max_query_len=most).jaxpr for most in (1, None)]
    assert ["triangular_solve" in str(jaxpr) for jaxpr in traced] == [False, True]
    assert_close(found[0], chunks[0], MAX_REL["layer"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("most", [None, 1])
def test_half_precision_is_rounded_once(dtype: Any, most: int | None) -> None:
    """Bit for bit what float32 gives, rounded; the history may be in the inputs' dtype too."""
    which = rows((1, 0, 1, 1), (4, 7, -1, 0), fresh=(3,))
    arrays: dict[str, Any] = blank(drawn(8), which)
    for name in ("mixed_qkv", "b", "a", "conv_state"):
        arrays[name] = np.asarray(jnp.asarray(arrays[name], dtype))
    wide = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    found, expected = (run(**x, **which, max_query_len=most) for x in (arrays, wide))
    assert [x.dtype for x in found] == [dtype, dtype, jnp.float32]
    rounded = (expected[0].astype(dtype), expected[1].astype(dtype), expected[2])
    for x, y in zip(found, rounded, strict=True):
        assert unequal(np.asarray(x), np.asarray(y)) == 0
    assert_right(found, arrays, which, float(jnp.finfo(dtype).eps) / 2 + MAX_REL["layer"])


@pytest.mark.parametrize("cut", [(1, 0, 1, 64, 0, 3, 1), (0, 0, 4, 2, 1, 0, 2)])
def test_rows_split_anywhere_give_what_one_call_gives(cut: tuple[int, ...]) -> None:
    which = rows()
    arrays = blank(drawn(), which)
    whole = run(**arrays, **which)
    at, parts = which["query_start_loc"], []
    states = {n: arrays[n] for n in ("conv_state", "recurrent_state")}
    for part, (begin, end) in enumerate((((0,) * 7, cut), (cut, LENGTHS))):
        # Only the first part of a row starts from zeros.
        seen = [r for r in range(7) if part and begin[r]]
        tokens = [np.arange(at[r] + begin[r], at[r] + end[r]) for r in range(7)]
        own = rows([len(x) for x in tokens], fresh=set(FRESH) - set(seen))
        order = np.concatenate(tokens)
        order = np.concatenate([order, np.full(T - len(order), at[-1])])
        now = {n: arrays[n][order] for n in ("mixed_qkv", "b", "a")}
        o, *new = run(**{**arrays, **now, **states}, **own)
        states = dict(zip(states, new, strict=True))
        parts.append((order[: own["query_start_loc"][-1]], o))
    joined = np.zeros_like(np.asarray(whole[0]))
    for order, o in parts:
        joined[order] = np.asarray(o)[: len(order)]
    live = at[5]
    assert_close(joined[:live], whole[0][:live], MAX_REL["layer"])
    assert_right((jnp.asarray(joined), *states.values()), arrays, which, MAX_REL["layer"])


def test_donated_states_are_updated_in_place() -> None:
    which = rows()
    arrays = blank(drawn(), which)
    expected = run(**arrays, **which)
    donating = jax.jit(
        gdn.ragged_gated_delta_rule, donate_argnames=("conv_state", "recurrent_state")
    )
    old = [jnp.array(arrays[n]) for n in ("conv_state", "recurrent_state")]
    places = [x.unsafe_buffer_pointer() for x in old]
    rest = {n: x for n, x in arrays.items() if not n.endswith("_state")}
    found = donating(**rest, conv_state=old[0], recurrent_state=old[1], **which)
    assert all(x.is_deleted() for x in old)
    assert [x.unsafe_buffer_pointer() for x in found[1:]] == places
    for x, y in zip(found, expected, strict=True):
        assert unequal(np.asarray(x), np.asarray(y)) == 0


def test_what_does_not_fit_is_refused() -> None:
    arrays, which = drawn(), rows()

    def refused(*fragments: str, error: type[Exception] = gdn.ShapeError, **wrong: Any) -> None:
        call = functools.partial(gdn.ragged_gated_delta_rule, **{**arrays, **which, **wrong})
        assert_refused(call, "ragged_gated_delta_rule: ", *fragments, error=error)

    refused("mixed_qkv has C = 95", "C = 2*HK*K + HV*V", mixed_qkv=arrays["mixed_qkv"][:, 1:])
    refused("mixed_qkv has shape (88,)", mixed_qkv=arrays["mixed_qkv"][:, 0])
    refused("b has shape (87, 4)", f"T={T}", b=arrays["b"][1:])
    refused("float64", a=arrays["a"].astype(np.float64))
    refused("recurrent_state", "float32", recurrent_state=jnp.zeros((N, HV, K, V), jnp.bfloat16))
    refused("conv_state", "needed [N=9, W-1, C=96] float32", conv_state=jnp.zeros((N, C, 3)))
    refused("conv_weight", "[C=96, W=4]", conv_weight=arrays["conv_weight"][:, 1:])
    refused("dt_bias", dt_bias=arrays["dt_bias"][1:])
    refused("has_initial_state", "bool", has_initial_state=np.ones(7, np.int32))
    refused("query_start_loc", "[R+1=8]", query_start_loc=which["query_start_loc"][1:])
    for wrong in ([1, 1, 1, 6, 76, 77, 80, 82], [0, 1, 1, 6, 76, 70, 80, 82], [0] * 7 + [T + 1]):
        refused("query_start_loc is [", query_start_loc=np.array(wrong, np.int32))
    refused("a row has 70 tokens; max_query_len is 1", max_query_len=1)
    refused("max_query_len is 0", max_query_len=0)
    for wrong in ((4, 7, 2, 0, 8, -1, 9), (4, 7, 2, 0, 8, -2, 5), (4, 7, 2, 0, 8, -1, 4)):
        slots = np.array(wrong, np.int32)
        refused("state_indices is [", "-1 to 8", error=gdn.SlotError, state_indices=slots)
