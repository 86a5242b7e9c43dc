"""The causal convolution over T tokens on XLA: its contract, and the bits of the step."""

from typing import Any

import jax
import pytest

from gdn_jax.layer import steps
from tests.support.contracts import CausalConv
from tests.support.tools import assert_same_bits, causal_conv1d

one_step = jax.jit(steps.causal_conv)


class TestXla(CausalConv):
    def channels(self, W: int) -> int:
        return 12

    def run(self, x: Any, hist: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
        return causal_conv1d(x, hist, weight)

    @pytest.mark.parametrize("W", CausalConv.WIDTHS)
    def test_equals_the_step_bit_for_bit(self, W: int) -> None:
        x, hist, weight = self.draw(6, W)
        out, new = self.run(x, hist, weight)
        for t in range(6):
            y, hist = one_step(x[:, t], hist, weight)
            assert_same_bits(y, out[:, t])
        assert_same_bits(hist, new)
