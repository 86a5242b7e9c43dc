"""What every backend of an operator must hold: one class an operator, one subclass a backend.

Sizes are a backend's own: the interpreter, which runs kernels here, takes seconds a program.
"""

import functools
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from tests.support.cases import OPERATOR, OpCase, operator_inputs
from tests.support.tools import MAX_REL, assert_close, assert_same_bits


@functools.cache
def drawn(case: OpCase) -> tuple[list[np.ndarray], np.ndarray | None]:
    """The operands in argument order, and the state, on the host: indexing there is cheap."""
    arrays, state = operator_inputs(case)
    return list(arrays.values()), state


class DeltaRule:
    """The gated delta rule, token by token."""

    BASE: OpCase
    """A live state, several rows, and two value heads a key head."""

    def shaped(self, case: OpCase) -> OpCase:
        """The case with heads and a length that this backend takes."""
        return case

    def run(self, *operands: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        """The operator on this backend."""
        raise NotImplementedError

    def check(self, case: OpCase) -> None:
        """Every head against float64."""
        operands, state = drawn(case)
        options: dict[str, Any] = dict(initial_state=state, use_qk_l2norm=case.l2norm)
        o, S = self.run(*operands, **options)
        ref_o, ref_S = oracle.recurrent_gated_delta_rule(*operands, **options)
        assert (o.dtype, S.dtype) == (jnp.float32, jnp.float32)
        limit = MAX_REL["float32_undecayed" if case.decay in ("none", -1e-3) else "float32"]
        for h in range(case.HV):
            assert_close(o[:, :, h], ref_o[:, :, h], limit, f"o of head {h}")
            assert_close(S[:, h], ref_S[:, h], limit, f"S of head {h}")

    @pytest.mark.parametrize("name", OPERATOR)
    def test_agrees_with_float64(self, name: str) -> None:
        self.check(self.shaped(OPERATOR[name]))

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_half_precision_inputs_are_computed_in_float32(self, dtype: Any) -> None:
        """The state is float32 and as near as ever; only the output is rounded, once."""
        operands, _ = drawn(self.shaped(OPERATOR["half_decay_hv_twice_hk"]))
        halves = [x.astype(dtype) for x in operands]
        o, S = self.run(*halves, scale=0.3)
        ref_o, ref_S = oracle.recurrent_gated_delta_rule(*halves, scale=0.3)
        assert (o.dtype, S.dtype) == (dtype, jnp.float32)
        assert_close(S, ref_S, MAX_REL["float32"])
        assert_close(o, ref_o, MAX_REL[jnp.dtype(dtype).name])

    def test_scale_is_applied_once_and_defaults_to_the_root_of_k(self) -> None:
        """A power of two commutes with every rounding, so the bits say how often it was used."""
        case = self.shaped(OPERATOR["one_token"])
        operands, state = drawn(case)
        run = functools.partial(self.run, *operands, initial_state=state)
        one, S = run(scale=1.0)
        for result, factor in ((run(scale=0.5), 0.5), (run(), case.K**-0.5)):
            assert_same_bits(result, (np.float32(factor) * np.asarray(one), S))

    def test_no_initial_state_means_zeros(self) -> None:
        operands, state = drawn(self.shaped(OPERATOR["one_token"]))
        assert state is not None
        assert_same_bits(self.run(*operands), self.run(*operands, initial_state=0 * state))

    def test_split_anywhere_and_continue(self) -> None:
        """The same steps in the same order, so bit for bit."""
        operands, state = drawn(self.BASE)
        whole = self.run(*operands, initial_state=state)
        for cut in range(1, self.BASE.T):
            head, middle = self.run(*(x[:, :cut] for x in operands), initial_state=state)
            tail, end = self.run(*(x[:, cut:] for x in operands), initial_state=middle)
            assert_same_bits((np.concatenate([head, tail], 1), end), whole)

    @pytest.mark.parametrize("which", range(6))
    def test_nan_stays_in_its_row_and_head(self, which: int) -> None:
        B, HV = self.BASE.B, self.BASE.HV
        row, head = which % B, (5 * which + 1) % HV
        operands, state = drawn(self.BASE)
        o, S = self.run(*operands, initial_state=state)
        spoilt = [np.array(x) for x in (*operands, state)]
        of_keys = which < 2
        place = (row, head) if which == 5 else (row, slice(None), head // 2 if of_keys else head)
        spoilt[which][place] = np.nan
        o2, S2 = self.run(*spoilt[:5], initial_state=spoilt[5])
        hit = np.zeros((B, HV), bool)
        hit[row, [head // 2 * 2, head // 2 * 2 + 1] if of_keys else head] = True
        np.testing.assert_array_equal(np.isnan(o2).any(axis=(1, 3)), hit)
        outputs = np.swapaxes(np.asarray(o), 1, 2), np.swapaxes(np.asarray(o2), 1, 2)
        assert_same_bits(outputs[0][~hit], outputs[1][~hit])
        # A spoilt query does not reach the state.
        keep = np.ones_like(hit) if which == 0 else ~hit
        assert_same_bits(np.asarray(S)[keep], np.asarray(S2)[keep])


class CausalConv:
    """The causal convolution of T tokens, from and to a history."""

    B, WIDTHS, LIMIT = 2, (2, 3, 4), MAX_REL["elementwise"]
    LENGTHS: tuple[int, ...] = (1, 2, 6)
    """1 and 2 are shorter than a history of 3: its frames are shifted, not overwritten."""

    def channels(self, W: int) -> int:
        """How many channels a convolution of W taps has here."""
        raise NotImplementedError

    def run(self, x: Any, hist: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
        """The operator on this backend."""
        raise NotImplementedError

    def draw(self, T: int, W: int, seed: int = 0) -> list[np.ndarray]:
        rng, C = np.random.default_rng(seed), self.channels(W)
        shapes = (self.B, T, C), (self.B, W - 1, C), (C, W)
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    @pytest.mark.parametrize("W", WIDTHS)
    def test_every_output_and_the_history(self, W: int) -> None:
        for T in self.LENGTHS:
            operands = self.draw(T, W)
            out, new = self.run(*operands)
            x, hist, weight = map(oracle.wide, operands)
            ext = np.concatenate([hist, x], axis=1)
            sums = np.sum([ext[:, j : j + T] * weight[:, j] for j in range(W)], axis=0)
            assert_close(out, oracle.silu(sums), self.LIMIT)
            assert_same_bits(new, ext[:, T:].astype(np.float32))

    @pytest.mark.parametrize("W", WIDTHS)
    def test_split_anywhere_and_continue(self, W: int) -> None:
        T = 6
        x, hist, weight = self.draw(T, W)
        whole = self.run(x, hist, weight)
        for cut in range(1, T):
            head, middle = self.run(x[:, :cut], hist, weight)
            tail, end = self.run(x[:, cut:], middle, weight)
            assert_same_bits((np.concatenate([head, tail], axis=1), end), whole)

    def test_nan_reaches_only_later_tokens_of_its_channel(self) -> None:
        x, hist, weight = self.draw(6, 4)
        out, _ = self.run(x, hist, weight)
        for t in range(1, 6):
            row, c = t % self.B, 7 * t % x.shape[-1]
            spoilt = x.copy()
            spoilt[row, t, c] = np.nan
            bad, _ = self.run(spoilt, hist, weight)
            expected = np.zeros_like(x, bool)
            expected[row, t : t + 4, c] = True
            np.testing.assert_array_equal(np.isnan(bad), expected)
            assert_same_bits(np.asarray(bad)[~expected], np.asarray(out)[~expected])


class Int4Product:
    """The int4 product of float32 rows with weights [N, K]."""

    LIMIT = MAX_REL["sum"]

    def run(self, x: np.ndarray, w: gdn.Q4Array) -> Any:
        """x·wᵀ on this backend."""
        raise NotImplementedError

    @staticmethod
    def draw(B: int, N: int, K: int) -> tuple[np.ndarray, gdn.Q4Array]:
        """Rows with outliers; every integer, and scales of both signs, one of them subnormal."""
        rng = np.random.default_rng((B, N, K))
        words = rng.integers(-(2**31), 2**31, (N, K // 8)).astype(np.int32)
        scales = rng.choice([-1, 1], (N, K // 32)) * 2 ** rng.uniform(-8, -3, (N, K // 32))
        scales[0, 0] = 2.0**-20
        x = rng.normal(size=(B, K))
        x[:, rng.integers(0, K, K // 40 + 1)] *= 20
        w = gdn.Q4Array(jnp.asarray(words), jnp.asarray(scales.astype(np.float16)))
        return x.astype(np.float32), w

    @pytest.mark.parametrize(
        ("B", "N", "K"), [(1, 64, 64), (1, 128, 384), (2, 64, 192), (4, 64, 256)]
    )
    def test_agrees_with_float64(self, B: int, N: int, K: int) -> None:
        x, w = self.draw(B, N, K)
        assert_close(self.run(x, w), x.astype(np.float64) @ decoded(w).T, self.LIMIT)

    def test_a_row_does_not_see_its_neighbours(self) -> None:
        x, w = self.draw(4, 64, 256)
        clean = np.asarray(self.run(x, w))
        x[1, 40] = 1e30
        assert_same_bits(np.delete(self.run(x, w), 1, 0), np.delete(clean, 1, 0))


def decoded(w: gdn.Q4Array) -> np.ndarray:
    """The weights in float64, decoded by the gguf package."""
    blocks, kind = gdn.q4_to_gguf_blocks(w), gguf.GGMLQuantizationType.Q4_0
    return gguf.quants.dequantize(blocks, kind).astype(np.float64)
