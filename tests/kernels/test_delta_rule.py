"""The Pallas kernel of the delta rule: interpreted against float64, and lowered for CUDA.

The interpreter ignores layouts, so each configuration is lowered for CUDA as well.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
import gdn_jax.ops.delta_rule
from gdn_jax import oracle
from pallas_kernels import tuning
from pallas_kernels.kernels.delta_rule import delta_rule_decode
from tests.support.cases import TILES, OpCase, operator_inputs
from tests.support.contracts import DeltaRule
from tests.support.mosaic import VALUES
from tests.support.tools import (
    MAX_REL,
    OP,
    assert_close,
    assert_refused,
    assert_same_bits,
    pretend_device,
)

BASE = OpCase(2, 3, 2, 4, 128, 64, live=True)


def draw(case: OpCase) -> list[np.ndarray]:
    """The kernel's operands: q and k of unit length, a scale, and a state."""
    arrays, S = operator_inputs(case)
    if case.l2norm:
        arrays |= {n: oracle.l2_normalise(arrays[n]).astype(np.float32) for n in ("q", "k")}
    if S is None:
        S = np.zeros((case.B, case.HV, case.K, case.V), np.float32)
    return [*arrays.values(), np.asarray(case.K**-0.5, np.float32), S]


@contextlib.contextmanager
def device(monkeypatch: pytest.MonkeyPatch, capability: str = "9.0"):
    """Let the support module see a CUDA GPU, and interpret what is meant for it."""
    pretend_device(monkeypatch, capability)
    kernel = functools.partial(delta_rule_decode, interpret=VALUES)
    monkeypatch.setattr(gdn_jax.ops.delta_rule, "delta_rule_decode", kernel)
    yield
    monkeypatch.undo()


class TestKernel(DeltaRule):
    BASE = BASE

    @pytest.fixture(autouse=True)
    def _device(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with device(monkeypatch):
            yield

    def shaped(self, case: OpCase) -> OpCase:
        return dataclasses.replace(case, T=min(case.T, 4), K=128 if case.l2norm else 64, V=64)

    def run(self, *operands: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        return gdn.recurrent_gated_delta_rule(*operands, backend="pallas", **options)

    @pytest.mark.parametrize(
        "case",
        [
            BASE,
            OpCase(1, 2, 1, 3, 128, 128, live=True),
            OpCase(3, 1, 1, 2, 64, 128, live=True),
        ],
    )
    def test_other_shapes_agree_with_float64(self, case: OpCase) -> None:
        self.check(case)


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_agrees_with_float64(tile: int) -> None:
    operands = draw(dataclasses.replace(BASE, K=64, V=128))
    o, S = delta_rule_decode(*map(jnp.asarray, operands), tile=tile, interpret=VALUES)
    ref_o, ref_S = oracle.recurrent_gated_delta_rule(*operands[:5], initial_state=operands[6])
    for h in range(BASE.HV):
        assert_close(o[:, :, h], ref_o[:, :, h], MAX_REL["float32"], f"o of head {h}")
        assert_close(S[:, h], ref_S[:, h], MAX_REL["float32"], f"S of head {h}")


def test_runs_repeat_and_the_callers_state_is_left_alone() -> None:
    operands = [jnp.asarray(x) for x in draw(BASE)]
    before = np.array(operands[6])
    first = delta_rule_decode(*operands, interpret=VALUES)
    assert_same_bits(operands[6], before)
    assert_same_bits(delta_rule_decode(*operands, interpret=VALUES), first)


def shapes(B: int, T: int, HK: int, HV: int, K: int, V: int) -> list[jax.ShapeDtypeStruct]:
    keys, values, heads = (B, T, HK, K), (B, T, HV, V), (B, T, HV)
    every = keys, keys, values, heads, heads, (), (B, HV, K, V)
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in every]


def lowered(function, operands) -> str:
    donate = len(operands) - 1
    traced = jax.jit(function, donate_argnums=donate).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("V", "tile"), [(V, t) for V in tuning.HEAD_DIMS for t in TILES if t <= V])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("K", tuning.HEAD_DIMS)
def test_lowers_for_cuda_in_place(K: int, T: int, V: int, tile: int) -> None:
    def tiled(*operands):
        return delta_rule_decode(*operands, tile=tile)

    text = lowered(tiled, shapes(2, T, 2, 6, K, V))
    assert text.count("@mosaic_gpu_v2") == 1
    assert "output_operand_alias" in text


def test_lowers_for_cuda_at_the_real_size() -> None:
    for B in (1, 8, 64, 4000):
        assert "@mosaic_gpu_v2" in lowered(delta_rule_decode, shapes(B, 1, 16, 48, 128, 128))


def test_tiles_fill_the_card_and_divide_v() -> None:
    for V in tuning.HEAD_DIMS:
        for B in (1, 8, 64):
            tile = tuning.delta_rule_tile(B, V)
            assert V % tile == 0
            assert 48 * B * V // tile >= 96


@pytest.mark.slow
def test_gradients_are_those_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    *tokens, _, S = map(jnp.asarray, draw(BASE))

    def gradients(backend: str):
        def loss(tokens, S):
            o, S = gdn.recurrent_gated_delta_rule(*tokens, initial_state=S, backend=backend)
            return jnp.sum(o * o) + jnp.sum(S * S)

        return jax.grad(loss, (0, 1))(tokens, S)

    with device(monkeypatch):
        assert_same_bits(gradients("pallas"), gradients("xla"))


@pytest.mark.slow
def test_vmap_is_more_rows_of_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    *tokens, _, S = map(jnp.asarray, draw(BASE))
    q, k, v, g = (jnp.stack([x, x[::-1], -x]) for x in tokens[:4])
    scales = jnp.asarray([0.1, 1.0, 2.0])

    def run(backend: str):
        def one(q, k, v, g, scale):
            return gdn.recurrent_gated_delta_rule(
                q, k, v, g, tokens[4], initial_state=S, scale=scale, backend=backend
            )

        return jax.vmap(one)(q, k, v, g, scales)

    with device(monkeypatch):
        for found, wanted in zip(run("pallas"), run("xla"), strict=True):
            assert_close(found, wanted, MAX_REL["float32"])


def test_both_operators_lower_for_cuda_inside_the_callers_jit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def token(carry, x):
        S, hist = carry
        mixed, hist = gdn.causal_conv1d(x, hist, taps, backend="pallas")
        q, v = mixed[..., :64].reshape(2, 1, 1, 64), mixed.reshape(2, 1, 3, 64)
        gates = mixed[..., :3]
        o, S = gdn.recurrent_gated_delta_rule(
            q, q, v, -jnp.exp(gates), gates, initial_state=S, backend="pallas"
        )
        return (S, hist), o

    taps = jnp.ones((192, 4))
    carry, xs = (jnp.ones((2, 3, 64, 64)), jnp.ones((2, 3, 192))), jnp.ones((5, 2, 1, 192))
    pretend_device(monkeypatch)
    text = lowered(lambda carry, xs: jax.lax.scan(token, carry, xs), (carry, xs))
    assert text.count("@mosaic_gpu_v2") == 2


def test_what_cannot_run_says_why_and_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(K: int = 64, V: int = 64, tokens: int = 1) -> str:
        return assert_refused(
            lambda: gdn.select_backend(OP, backend="pallas", K=K, V=V, tokens=tokens),
            "backend='xla' runs it",
            error=gdn.BackendUnavailableError,
        )

    assert "no CUDA GPU, the device is cpu" in refuse()
    assert gdn.select_backend(OP) == "xla"
    with device(monkeypatch, "7.5"):
        assert "compute capability 7.5, the kernel needs 8.0" in refuse()
    with device(monkeypatch):
        assert "K is 96, the kernel needs 64 or 128" in refuse(K=96)
        assert "V is 256, the kernel needs 64 or 128" in refuse(V=256)
        assert "T is 4097, the kernel takes at most 4096 tokens" in refuse(tokens=4097)
        assert gdn.select_backend(OP, K=96, V=64) == "xla"
        tokens = map(jnp.asarray, draw(dataclasses.replace(BASE, V=8))[:5])
        assert_refused(
            lambda: gdn.recurrent_gated_delta_rule(*tokens, backend="pallas"),
            "V is 8",
            error=gdn.BackendUnavailableError,
        )
