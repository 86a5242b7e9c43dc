"""Activations in bfloat16 and float16: float32 inside, one rounding at the end."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gdn_jax as gdn
from gdn_jax.layer.compose import kernel_step
from gdn_jax.layer.pallas import KernelLayer
from tests.support.cases import LAYER
from tests.support.tools import assert_same_bits, layer

pytestmark = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
CFG = LAYER["tiny"].cfg
LENGTHS = jnp.array([3, 5], jnp.int32)


def bank_of(params: gdn.GDNParams) -> gdn.LayerBank:
    return gdn.LayerBank(CFG, 1).preload(0, params)


def stacked(state: gdn.GDNState) -> gdn.GDNState:
    return jax.tree.map(lambda x: x[None], state)


def step_slots(params: Any, state: gdn.GDNState, xs: jax.Array) -> Any:
    pool, slots = gdn.StatePool.create(CFG, 1, 3).alloc(2)
    return bank_of(params).step_slots(pool, 0, xs[:, 0], slots)


def draft_slots(params: Any, state: gdn.GDNState, xs: jax.Array) -> Any:
    pool, slots = gdn.StatePool.create(CFG, 1, 3).alloc(2)
    return bank_of(params).draft_slots(pool, 0, xs, slots)


ENTRIES: dict[str, Callable[..., Any]] = {
    "decode_step": lambda p, s, xs: gdn.decode_step(p, s, xs[:, 0], CFG),
    "trace_step": lambda p, s, xs: gdn.trace_step(p, s, xs[:, 0], CFG),
    "decode": lambda p, s, xs: gdn.decode(p, s, xs, CFG),
    "decode one token": lambda p, s, xs: gdn.decode(p, s, xs[:, :1], CFG),
    "prefill": lambda p, s, xs: gdn.prefill(p, s, xs, CFG, lengths=LENGTHS),
    "prefill one token": lambda p, s, xs: gdn.prefill(p, s, xs[:, :1], CFG),
    "bank step": lambda p, s, xs: bank_of(p).step(stacked(s), 0, xs[:, 0]),
    "bank decode": lambda p, s, xs: bank_of(p).decode(stacked(s), 0, xs),
    "step_slots": step_slots,
    "draft_slots": draft_slots,
}


@functools.cache
def jitted(name: str) -> Any:
    return jax.jit(ENTRIES[name])


@pytest.mark.parametrize("name", ENTRIES)
def test_the_bits_are_those_of_float32_rounded_once(name: str, dtype: Any) -> None:
    """Only y is rounded: states, the trace and what a draft keeps are float32, and equal."""
    params, state, xs = layer(LAYER["tiny"])
    half = xs.astype(dtype)
    y, *rest = jitted(name)(params, state, half)
    wide, *wide_rest = jitted(name)(params, state, half.astype(jnp.float32))
    assert y.dtype == dtype
    assert_same_bits(np.asarray(y), np.asarray(wide.astype(dtype)))
    assert_same_bits(rest, wide_rest)
    floats = (x for x in jax.tree.leaves(rest) if jnp.issubdtype(x.dtype, jnp.floating))
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}


def test_no_rounding_is_left_out_in_a_residual_stream(dtype: Any) -> None:
    """One loop with the stream in half precision, against its tokens one program after another."""
    params, start, xs = layer(LAYER["tiny"])

    def block(state: gdn.GDNState, x: jax.Array) -> tuple[gdn.GDNState, jax.Array]:
        x = (x * 1.1).astype(dtype)
        y, state = gdn.decode_step(params, state, x, CFG)
        return state, (x + y).astype(jnp.float32)

    def apart(state: gdn.GDNState, x: jax.Array) -> tuple[gdn.GDNState, jax.Array]:
        x = jax.jit(lambda x: (x * 1.1).astype(dtype))(x)
        y, state = jax.jit(gdn.decode_step, static_argnames="cfg")(params, state, x, CFG)
        return state, jax.jit(lambda x, y: (x + y).astype(jnp.float32))(x, y)

    together = jax.jit(lambda state, xs: lax.scan(block, state, xs))(start, jnp.swapaxes(xs, 0, 1))
    state, found = start, []
    for t in range(xs.shape[1]):
        state, y = apart(state, xs[:, t])
        found.append(y)
    assert_same_bits(together, (state, jnp.stack(found)))


def test_the_host_loop_keeps_the_dtype(dtype: Any) -> None:
    params, state, xs = layer(LAYER["tiny"])
    half = np.asarray(xs.astype(dtype))
    ys, after = bank_of(params).decode_host(stacked(state), 0, half)
    expected = bank_of(params).decode(stacked(state), 0, jnp.asarray(half))
    assert ys.dtype == half.dtype
    assert_same_bits((ys, after), expected)


def test_the_kernels_take_it_too(dtype: Any) -> None:
    """Lowered for CUDA: y in the dtype of x, states and the trace in float32."""
    cfg = gdn.GDNConfig(256, 1, 2, 128, 128)
    params = jax.eval_shape(lambda: gdn.init_params(jax.random.key(0), cfg))
    state = jax.eval_shape(lambda: gdn.init_state(cfg, 2))

    def run(params: gdn.GDNParams, state: gdn.GDNState, x: jax.Array) -> Any:
        return kernel_step(KernelLayer(params, cfg), state, x, trace=True)

    x = jax.ShapeDtypeStruct((2, 256), dtype)
    y, after, trace = jax.eval_shape(run, params, state, x)
    assert (y.shape, y.dtype) == ((2, 256), dtype)
    assert {x.dtype for x in jax.tree.leaves((after, trace))} == {jnp.dtype(jnp.float32)}
    assert jax.jit(run).trace(params, state, x).lower(lowering_platforms=("cuda",))
