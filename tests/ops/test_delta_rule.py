"""The contract of the gated delta rule, which every backend must hold, and its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_jax import oracle
from gdn_jax import recurrent_gated_delta_rule as unjitted
from tests.support.cases import OPERATOR, OpCase, operator_inputs
from tests.support.tools import (
    MAX_REL,
    RUNNABLE,
    assert_close,
    assert_same_bits,
    delta_rule,
    max_rel,
)

NAMES = ("q", "k", "v", "g", "beta")
BASE = OpCase(3, 5, 2, 4, 16, 8, live=True)
"""The shape that the properties share, so that it is compiled once."""


def draw(case: OpCase):
    """The operands in argument order, and the state, on the host: indexing there is cheap."""
    arrays, state = operator_inputs(case)
    return [arrays[n] for n in NAMES], state


@functools.cache
def reference(name: str):
    (q, k, v, g, beta), state = draw(OPERATOR[name])
    l2norm = OPERATOR[name].l2norm
    return oracle.recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, use_qk_l2norm=l2norm
    )


def test_there_is_a_backend_to_test() -> None:
    assert "xla" in RUNNABLE


@pytest.mark.parametrize("backend", RUNNABLE)
class TestContract:
    @pytest.mark.parametrize("name", OPERATOR)
    def test_agrees_with_float64(self, backend: str, name: str) -> None:
        case = OPERATOR[name]
        operands, state = draw(case)
        o, S = delta_rule(
            *operands, initial_state=state, use_qk_l2norm=case.l2norm, backend=backend
        )
        assert S.dtype == jnp.float32
        limit = MAX_REL["float32_undecayed" if case.decay in ("none", -1e-3) else "float32"]
        ref_o, ref_S = reference(name)
        for h in range(case.HV):
            assert_close(o[:, :, h], ref_o[:, :, h], limit, f"o of head {h}")
            assert_close(S[:, h], ref_S[:, h], limit, f"S of head {h}")

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_half_precision_inputs_are_computed_in_float32(self, backend: str, dtype) -> None:
        """The state is float32 and as near as ever; only the output is rounded, once."""
        operands, _ = draw(OPERATOR["half_decay_hv_twice_hk"])
        halves = [x.astype(dtype) for x in operands]
        o, S = delta_rule(*halves, backend=backend)
        ref_o, ref_S = oracle.recurrent_gated_delta_rule(*halves)
        assert (o.dtype, S.dtype) == (dtype, jnp.float32)
        assert_close(S, ref_S, MAX_REL["float32"])
        assert_close(o, ref_o, MAX_REL[jnp.dtype(dtype).name])

    def test_scale_is_applied_once_and_defaults_to_the_root_of_k(self, backend: str) -> None:
        """A power of two commutes with every rounding, so the bits say how often it was used."""
        operands, state = draw(BASE)
        run = functools.partial(delta_rule, *operands, initial_state=state, backend=backend)
        one, S = run(scale=1.0)
        for result, factor in ((run(scale=0.5), 0.5), (run(), 16**-0.5)):
            assert_same_bits(result, (factor * np.asarray(one), S))

    def test_no_initial_state_means_zeros(self, backend: str) -> None:
        operands, state = draw(BASE)
        assert state is not None
        zeros = delta_rule(*operands, initial_state=0 * state, backend=backend)
        assert_same_bits(delta_rule(*operands, backend=backend), zeros)

    @given(cut=st.integers(1, BASE.T - 1))
    def test_split_anywhere_and_continue(self, backend: str, cut: int) -> None:
        """The same steps in the same order, so bit for bit."""
        operands, state = draw(BASE)
        o, S = delta_rule(*operands, initial_state=state, backend=backend)
        head, middle = delta_rule(
            *(x[:, :cut] for x in operands), initial_state=state, backend=backend
        )
        tail, end = delta_rule(
            *(x[:, cut:] for x in operands), initial_state=middle, backend=backend
        )
        assert_same_bits((np.concatenate([head, tail], 1), end), (o, S))

    @given(which=st.sampled_from(NAMES), t=st.integers(1, BASE.T - 1), value=st.floats(-1, 0))
    def test_causality(self, backend: str, which: str, t: int, value: float) -> None:
        operands, state = draw(BASE)
        o, _ = delta_rule(*operands, initial_state=state, backend=backend)
        i = NAMES.index(which)
        changed = [x.copy() for x in operands]
        changed[i][:, t:] = value
        later, _ = delta_rule(*changed, initial_state=state, backend=backend)
        assert_same_bits(later[:, :t], o[:, :t])
        assert max_rel(later[:, t:], o[:, t:]) > 1e-3

    @given(rows=st.permutations(range(BASE.B)), keys=st.permutations(range(BASE.HK)))
    def test_rows_and_heads_are_independent(self, backend: str, rows, keys) -> None:
        """Permuted going in, permuted coming out; value heads move with their key head."""
        rows, keys = np.array(rows), np.array(keys)
        values = (2 * keys[:, None] + np.arange(2)).ravel()
        operands, state = draw(BASE)
        assert state is not None
        o, S = map(np.asarray, delta_rule(*operands, initial_state=state, backend=backend))
        heads = [keys, keys, values, values, values]
        moved = [x[rows][:, :, h] for x, h in zip(operands, heads, strict=True)]
        again = delta_rule(*moved, initial_state=state[rows][:, values], backend=backend)
        assert_same_bits(again, (o[rows][:, :, values], S[rows][:, values]))

    @given(which=st.integers(0, 5), row=st.integers(0, 2), head=st.integers(0, 3))
    def test_nan_stays_in_its_row_and_head(
        self, backend: str, which: int, row: int, head: int
    ) -> None:
        operands, state = draw(BASE)
        assert state is not None
        o, S = delta_rule(*operands, initial_state=state, backend=backend)
        spoilt = [x.copy() for x in (*operands, state)]
        of_keys = which < 2
        place = (row, head) if which == 5 else (row, slice(None), head // 2 if of_keys else head)
        spoilt[which][place] = np.nan
        o2, S2 = delta_rule(*spoilt[:5], initial_state=spoilt[5], backend=backend)
        hit = np.zeros((BASE.B, BASE.HV), bool)
        hit[row, [head // 2 * 2, head // 2 * 2 + 1] if of_keys else head] = True
        np.testing.assert_array_equal(np.isnan(o2).any(axis=(1, 3)), hit)
        outputs = np.swapaxes(np.asarray(o), 1, 2), np.swapaxes(np.asarray(o2), 1, 2)
        assert_same_bits(outputs[0][~hit], outputs[1][~hit])
        # A spoilt query does not reach the state.
        keep = np.ones_like(hit) if which == 0 else ~hit
        assert_same_bits(np.asarray(S)[keep], np.asarray(S2)[keep])

    def test_drift_over_512_tokens(self, backend: str) -> None:
        """Without decay nothing is forgotten, the rounding neither; the last 64 tokens tell."""
        case = OpCase(1, 512, 1, 2, 32, 16, "none", seed=3)
        operands, _ = draw(case)
        o, S = delta_rule(*operands, backend=backend)
        ref_o, ref_S = oracle.recurrent_gated_delta_rule(*operands)
        assert_close(o[:, -64:], ref_o[:, -64:], MAX_REL["float32_undecayed"])
        assert_close(S, ref_S, MAX_REL["float32_undecayed"])

    def test_a_state_kept_in_bfloat16_would_show(self, backend: str) -> None:
        """The limits above are far below the damage of a rounded state."""
        operands, _ = draw(BASE)
        start = [x[:, :4] for x in operands]
        rest = [x[:, 4:] for x in operands]
        _, S = delta_rule(*start, backend=backend)
        rounded = np.asarray(S).astype(jnp.bfloat16).astype(np.float32)
        o, _ = delta_rule(*rest, initial_state=S, backend=backend)
        off, _ = delta_rule(*rest, initial_state=rounded, backend=backend)
        assert max_rel(off, o) > 100 * MAX_REL["float32"]

    def test_views_of_a_fused_tensor_equal_contiguous_copies(self, backend: str) -> None:
        """HV = HK, where g and beta may be interleaved columns of one projection."""
        operands, state = draw(OPERATOR["no_decay_hv_equals_hk"])
        fused = np.stack(operands[3:], axis=-1)
        g, beta = fused[..., 0], fused[..., 1]
        assert not g.flags.c_contiguous
        run = functools.partial(delta_rule, *operands[:3], backend=backend, initial_state=state)
        assert_same_bits(run(g, beta), run(*operands[3:]))

    def test_under_vmap(self, backend: str) -> None:
        operands, state = draw(BASE)
        assert state is not None
        pairs = [np.stack([x, x[::-1]]) for x in (*operands, state)]
        run = functools.partial(unjitted, backend=backend)
        both = jax.jit(jax.vmap(lambda *xs: run(*xs[:5], initial_state=xs[5])))(*pairs)
        one = delta_rule(*operands, initial_state=state, backend=backend)
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
    operands, state = draw(case)
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
