"""The Pallas kernel of the causal convolution, interpreted and lowered for CUDA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
import gdn_jax.ops.causal_conv
from pallas_kernels.kernels.causal_conv import causal_conv
from pallas_kernels.tuning import CONV_TOKENS
from tests.support.contracts import CausalConv
from tests.support.mosaic import VALUES
from tests.support.tools import assert_close, assert_same_bits, pretend_device

B = 2


def draw(T: int, W: int, C: int = 64) -> list[jax.Array]:
    rng = np.random.default_rng(T)
    shapes = (B, T, C), (B, W - 1, C), (C, W)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


class TestKernel(CausalConv):
    LIMIT = 5e-7
    LENGTHS = (1, 2, CONV_TOKENS, 2 * CONV_TOKENS + 1)

    def channels(self, W: int) -> int:
        """In pieces of 64 and of 128."""
        return 128 if W == 3 else 192

    def run(self, x: Any, hist: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
        return causal_conv(x, hist, weight, interpret=VALUES)


@pytest.mark.slow
def test_the_operator_runs_it_with_the_gradients_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = draw(3, 4)

    def results(backend: str):
        def loss(operands):
            out, new = gdn.causal_conv1d(*operands, backend=backend)
            return jnp.sum(out * out) + jnp.sum(new * new)

        return gdn.causal_conv1d(*operands, backend=backend), jax.grad(loss)(operands)

    (out, new), gradients = results("xla")
    pretend_device(monkeypatch)
    kernel = functools.partial(causal_conv, interpret=VALUES)
    monkeypatch.setattr(gdn_jax.ops.causal_conv, "causal_conv", kernel)
    (found, last), theirs = results("pallas")
    assert_close(found, out, 5e-7)
    assert_same_bits((last, theirs), (new, gradients))


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch)
    for C, W, reason in ((96, 4, "C is 96, .* multiple of 64"), (64, 5, "W is 5, .* 2 or 3 or 4")):
        assert gdn.select_backend("causal_conv1d", C=C, W=W) == "xla"
        with pytest.raises(gdn.BackendUnavailableError, match=reason):
            gdn.causal_conv1d(*draw(1, W, C), backend="pallas")


@pytest.mark.parametrize(("T", "W", "C"), [(1, 4, 10240), (37, 2, 64), (5, 3, 8192)])
def test_lowers_for_cuda(T: int, W: int, C: int) -> None:
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, T, C), (B, W - 1, C), (C, W))]
    text = jax.jit(causal_conv).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
