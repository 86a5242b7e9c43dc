"""Drafts against serial decoding of the accepted tokens, bit for bit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn_jax as gdn
from gdn_jax.layer.compose import forward
from gdn_jax.serving import drafts
from gdn_jax.serving.drafts import SCHEMES, Plan, planned
from tests.support.tools import assert_refused, assert_same_bits

CFG = gdn.GDNConfig(64, 2, 4, 16, 8, conv_width=4)
B, TD = 3, 5
TREE = np.array([[-1, 0, 0, 2, 1], [-1, -1, 0, 1, 3], [-1, 0, 1, 2, 3]], np.int32)
params = gdn.init_params(jax.random.key(0), CFG)
one_step = jax.jit(functools.partial(gdn.decode_step, cfg=CFG))


@jax.jit
def run_draft(state, xs, plan: Plan):
    return drafts.draft(lambda s, x: forward(params, s, x, CFG), state, xs, plan, CFG, "xla")


commit = jax.jit(drafts.committed)


def start(seed: int = 0) -> tuple[gdn.GDNState, jax.Array]:
    rng = np.random.default_rng(seed)
    state = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), gdn.init_state(CFG, B)
    )
    return state, jnp.asarray(rng.normal(size=(B, TD, CFG.d_model)), jnp.float32)


def draft(state, xs, scheme: str, lengths: Any = None, parents: Any = None):
    return run_draft(state, xs, planned("draft", B, xs.shape[1], lengths, parents, scheme))


def path_to(parents: np.ndarray, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def serial(state: gdn.GDNState, xs: jax.Array, paths: list[list[int]]):
    """Every row decodes its own path; rows that are done step on beside it and are put back."""
    last = [np.zeros(CFG.d_model, np.float32)] * B
    for i in range(max(map(len, paths), default=0)):
        going = np.array([i < len(path) for path in paths])
        tokens = [path[i] if i < len(path) else 0 for path in paths]
        y, after = one_step(params, state, xs[np.arange(B), tokens])
        last = [np.asarray(y[b]) if going[b] else last[b] for b in range(B)]
        state = jax.tree.map(
            lambda old, new, g=going: jnp.where(g.reshape(-1, *[1] * (old.ndim - 1)), new, old),
            state,
            after,
        )
    return state, last


@pytest.mark.slow
@given(
    accepted=st.lists(st.integers(0, TD), min_size=B, max_size=B),
    lengths=st.lists(st.integers(0, TD), min_size=B, max_size=B),
    tree=st.booleans(),
    scheme=st.sampled_from(SCHEMES),
    seed=st.integers(0, 99),
)
def test_a_commit_is_serial_decoding(accepted, lengths, tree, scheme, seed) -> None:
    state, xs = start(seed)
    parents = TREE if tree else None
    ys, record = draft(state, xs, scheme, np.asarray(lengths, np.int32), parents)
    taken = [min(a, n) for a, n in zip(accepted, lengths, strict=True)]
    chain = np.arange(-1, TD - 1)
    paths = [path_to(TREE[b] if tree else chain, n - 1) for b, n in enumerate(taken)]
    expected, last = serial(state, xs, paths)
    assert_same_bits(commit(record, state, jnp.asarray(accepted, jnp.int32)), expected)
    for b, n in enumerate(taken):
        if n:
            assert_same_bits(ys[b, n - 1], last[b])
        np.testing.assert_array_equal(ys[b, lengths[b] :], 0)


def test_one_token_is_a_decode_step_bit_for_bit() -> None:
    state, xs = start()
    y, after = one_step(params, state, xs[:, 0])
    for scheme in SCHEMES:
        ys, record = draft(state, xs[:, :1], scheme)
        assert_same_bits(ys[:, 0], y)
        assert_same_bits(commit(record, state, jnp.ones(B, jnp.int32)), after)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rejected_tokens_leave_no_trace_even_if_not_finite(scheme: str) -> None:
    state, xs = start()
    spoilt = xs.at[:, 2:].set(jnp.nan)
    _, record = draft(state, spoilt, scheme)
    expected, _ = serial(state, xs, [[0, 1], [0], []])
    assert_same_bits(commit(record, state, jnp.array([2, 1, 0], jnp.int32)), expected)


def test_bytes_follow_their_formulas() -> None:
    state, xs = start()
    sizes = {scheme: draft(state, xs, scheme)[1].nbytes for scheme in SCHEMES}
    HK, HV, K, V = CFG.num_k_heads, CFG.num_v_heads, CFG.head_k_dim, CFG.head_v_dim
    common = 4 * B * (TD * CFG.conv_dim + TD + 1)
    assert sizes["snapshot"] - common == 4 * B * TD * HV * K * V
    assert sizes["replay"] - common == 4 * B * TD * (2 * HK * K + HV * V + 2 * HV)


def test_what_is_no_draft_is_refused() -> None:
    long, loop = np.full(B, TD + 1, np.int32), np.zeros((B, TD), np.int32)
    assert_refused(lambda: planned("draft", B, TD, long, None, "replay"), "needed 0 to 5")
    assert_refused(lambda: planned("draft", B, TD, None, loop, "replay"), "no earlier token")
    assert_refused(lambda: planned("draft", B, TD, None, TREE[:2], "replay"), "parents", "B=3")
    assert_refused(
        lambda: planned("draft", B, TD, None, None, "undo"), "no scheme 'undo'", "replay"
    )
