"""The gated delta rule on XLA: its contract, what small heads make cheap, and gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_jax import oracle
from gdn_jax import recurrent_gated_delta_rule as unjitted
from tests.support.cases import OPERATOR, OpCase
from tests.support.contracts import DeltaRule, drawn
from tests.support.tools import (
    MAX_REL,
    assert_close,
    assert_same_bits,
    delta_rule,
    max_rel,
)

NAMES = ("q", "k", "v", "g", "beta")
BASE = OpCase(3, 5, 2, 4, 16, 8, live=True)
"""The shape that the properties share, so that it is compiled once."""


class TestXla(DeltaRule):
    BASE = BASE

    def run(self, *operands: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        return delta_rule(*operands, backend="xla", **options)

    @given(which=st.sampled_from(NAMES), t=st.integers(1, BASE.T - 1), value=st.floats(-1, 0))
    def test_causality(self, which: str, t: int, value: float) -> None:
        operands, state = drawn(BASE)
        o, _ = self.run(*operands, initial_state=state)
        i = NAMES.index(which)
        changed = [x.copy() for x in operands]
        changed[i][:, t:] = value
        later, _ = self.run(*changed, initial_state=state)
        assert_same_bits(later[:, :t], o[:, :t])
        assert max_rel(later[:, t:], o[:, t:]) > 1e-3

    @given(rows=st.permutations(range(BASE.B)), keys=st.permutations(range(BASE.HK)))
    def test_rows_and_heads_are_independent(self, rows, keys) -> None:
        """Permuted going in, permuted coming out; value heads move with their key head."""
        rows, keys = np.array(rows), np.array(keys)
        values = (2 * keys[:, None] + np.arange(2)).ravel()
        operands, state = drawn(BASE)
        assert state is not None
        o, S = map(np.asarray, self.run(*operands, initial_state=state))
        heads = [keys, keys, values, values, values]
        moved = [x[rows][:, :, h] for x, h in zip(operands, heads, strict=True)]
        again = self.run(*moved, initial_state=state[rows][:, values])
        assert_same_bits(again, (o[rows][:, :, values], S[rows][:, values]))

    def test_drift_over_512_tokens(self) -> None:
        """Without decay nothing is forgotten, the rounding neither; the last 64 tokens tell."""
        case = OpCase(1, 512, 1, 2, 32, 16, "none", seed=3)
        operands, _ = drawn(case)
        o, S = self.run(*operands)
        ref_o, ref_S = oracle.recurrent_gated_delta_rule(*operands)
        assert_close(o[:, -64:], ref_o[:, -64:], MAX_REL["float32_undecayed"])
        assert_close(S, ref_S, MAX_REL["float32_undecayed"])

    def test_a_state_kept_in_bfloat16_would_show(self) -> None:
        """The limits above are far below the damage of a rounded state."""
        operands, _ = drawn(BASE)
        start = [x[:, :4] for x in operands]
        rest = [x[:, 4:] for x in operands]
        _, S = self.run(*start)
        rounded = np.asarray(S).astype(jnp.bfloat16).astype(np.float32)
        o, _ = self.run(*rest, initial_state=S)
        off, _ = self.run(*rest, initial_state=rounded)
        assert max_rel(off, o) > 100 * MAX_REL["float32"]

    def test_views_of_a_fused_tensor_equal_contiguous_copies(self) -> None:
        """HV = HK, where g and beta may be interleaved columns of one projection."""
        operands, state = drawn(OPERATOR["no_decay_hv_equals_hk"])
        fused = np.stack(operands[3:], axis=-1)
        g, beta = fused[..., 0], fused[..., 1]
        assert not g.flags.c_contiguous
        run = functools.partial(self.run, *operands[:3], initial_state=state)
        assert_same_bits(run(g, beta), run(*operands[3:]))

    def test_under_vmap(self) -> None:
        operands, state = drawn(BASE)
        assert state is not None
        pairs = [np.stack([x, x[::-1]]) for x in (*operands, state)]
        run = functools.partial(unjitted, backend="xla")
        both = jax.jit(jax.vmap(lambda *xs: run(*xs[:5], initial_state=xs[5])))(*pairs)
        one = self.run(*operands, initial_state=state)
        assert_same_bits(both, [np.stack([x, x[::-1]]) for x in map(np.asarray, one)])


GRADIENTS = {
    "drawn": OpCase(1, 4, 1, 2, 4, 3, live=True, l2norm=True),
    "zero_keys": OpCase(1, 4, 1, 2, 4, 3, keys="some_zero", live=True, l2norm=True),
    "strong_decay": OpCase(1, 4, 1, 2, 4, 3, "strong", live=True, l2norm=True),
    "beta_zero": OpCase(1, 4, 1, 2, 4, 3, beta=0.0, live=True, l2norm=True),
    "beta_one": OpCase(1, 4, 1, 2, 4, 3, beta=1.0, live=True, l2norm=True),
}


@jax.jit
@jax.grad
def loss_gradient(args, weights):
    o, S = unjitted(*args[:5], initial_state=args[5], use_qk_l2norm=True)
    return jnp.sum(weights[0] * o) + jnp.sum(weights[1] * S)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_float64_differences(name: str) -> None:
    """Every operand's gradient along a drawn direction, against the oracle's central difference."""
    case = GRADIENTS[name]
    operands, state = drawn(case)
    args, rng = [*operands, state], np.random.default_rng(7)
    o_shape, S_shape = (1, case.T, case.HV, case.V), (1, case.HV, case.K, case.V)
    weights = [rng.standard_normal(shape).astype(np.float32) for shape in (o_shape, S_shape)]
    gradients = loss_gradient(args, weights)

    def loss(i: int, step: np.ndarray) -> float:
        moved = [np.asarray(x, np.float64) for x in args]
        moved[i] = moved[i] + step
        o, S = oracle.recurrent_gated_delta_rule(
            *moved[:5], initial_state=moved[5], use_qk_l2norm=True
        )
        return float(np.sum(weights[0] * o) + np.sum(weights[1] * S))

    for i, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all()
        direction = rng.standard_normal(np.shape(gradient))
        slope = (loss(i, 1e-6 * direction) - loss(i, -1e-6 * direction)) / 2e-6
        found = float(np.sum(np.asarray(gradient, np.float64) * direction))
        scale = np.abs(np.asarray(gradient) * direction).sum()
        assert abs(found - slope) <= 1e-5 * scale + 1e-6, (*NAMES, "S")[i]
