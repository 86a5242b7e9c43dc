"""A layer's prefill against decoding, float64 and transformers' one-shot path."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.layer.params import LARGE
from gdn_jax.verify.draw import draw_inputs, draw_weights
from gdn_jax.verify.oracles.oracle_file import load_oracle, redraw_weights, shipped_oracle
from tests.support.tools import MAX_REL, assert_close, assert_refused, assert_same_bits

CFG = gdn.GDNConfig(64, 2, 4, 16, 8)
T = 70
WEIGHTS = draw_weights(CFG, 0)
PARAMS = gdn.GDNParams(**{name: jnp.asarray(x) for name, x in WEIGHTS.items()})
XS = jnp.stack([jnp.asarray(draw_inputs(CFG, T, seed)) for seed in range(2)])

prefill = jax.jit(gdn.prefill, static_argnames=("cfg", "chunk_size"))
decode = jax.jit(gdn.decode, static_argnames="cfg")


def by_token(state: gdn.GDNState, xs: jax.Array) -> tuple[jax.Array, gdn.GDNState]:
    """Decoding in calls of one token: one program for any length."""
    ys = []
    for t in range(xs.shape[1]):
        y, state = decode(PARAMS, state, xs[:, t : t + 1], CFG)
        ys.append(y)
    return jnp.concatenate(ys, 1), state


@functools.cache
def decoded() -> tuple[jax.Array, gdn.GDNState]:
    return decode(PARAMS, gdn.init_state(CFG, 2), XS, CFG)


def assert_state(found: gdn.GDNState, wanted: gdn.GDNState, limit: float) -> None:
    for name in ("S", "conv_hist"):
        assert_close(getattr(found, name), getattr(wanted, name), limit, name)


def test_it_is_decoding_and_float64() -> None:
    ys, state = prefill(PARAMS, gdn.init_state(CFG, 2), XS, CFG)
    assert_close(ys, decoded()[0], MAX_REL["layer_worst"])
    assert_state(state, decoded()[1], MAX_REL["layer"])
    for b in range(2):
        exact = oracle.layer_trace(WEIGHTS, CFG, np.asarray(XS[b]))
        assert_close(ys[b], exact["OUT"], MAX_REL["layer_worst"])
        assert_close(state.S[b], exact["S"][-1], MAX_REL["layer"])
        assert_close(state.conv_hist[b], exact["HIST"][-1], MAX_REL["layer"])


@pytest.mark.parametrize("cut", [2, 64])
def test_decode_goes_on_and_prefill_goes_on_from_it(cut: int) -> None:
    first, state = prefill(PARAMS, gdn.init_state(CFG, 2), XS[:, :cut], CFG)
    rest, after = by_token(state, XS[:, cut:])
    assert_close(jnp.concatenate([first, rest], 1), decoded()[0], MAX_REL["layer_worst"])
    assert_state(after, decoded()[1], MAX_REL["layer"])
    first, state = by_token(gdn.init_state(CFG, 2), XS[:, :cut])
    rest, after = prefill(PARAMS, state, XS[:, cut:], CFG, chunk_size=16)
    assert_close(jnp.concatenate([first, rest], 1), decoded()[0], MAX_REL["layer_worst"])
    assert_state(after, decoded()[1], MAX_REL["layer"])


@pytest.mark.parametrize("lengths", [(0, 33), (1, 70), (2, 3)])
def test_padding_on_the_right_counts_for_nothing(lengths: tuple[int, int]) -> None:
    live = jax.tree.map(lambda x: x + 0.25, gdn.init_state(CFG, 2))
    padding = jnp.arange(T)[None] >= jnp.asarray(lengths)[:, None]
    xs = jnp.where(padding[..., None], jnp.nan, XS)
    ys, state = prefill(PARAMS, live, xs, CFG, lengths=jnp.asarray(lengths, jnp.int32))
    for b, n in enumerate(lengths):
        assert not np.any(ys[b, n:])
        own = jax.tree.map(lambda x, b=b: x[b : b + 1], live)
        after = jax.tree.map(lambda x, b=b: x[b : b + 1], state)
        if n == 0:
            for x, y in zip(*map(jax.tree.leaves, (after, own)), strict=True):
                assert_same_bits(x, y)
            continue
        alone, wanted = by_token(own, XS[b : b + 1, :n])
        assert_close(ys[b, :n], alone[0], MAX_REL["layer_worst"])
        assert_state(after, wanted, MAX_REL["layer"])


def test_a_gate_far_above_softplus_decays_and_does_not_wipe() -> None:
    params = dataclasses.replace(PARAMS, dt_bias=jnp.full_like(PARAMS.dt_bias, 95.0))
    weights = WEIGHTS | {"dt_bias": np.full_like(WEIGHTS["dt_bias"], 95.0)}
    ys, state = prefill(params, gdn.init_state(CFG, 2), XS, CFG)
    exact = oracle.layer_trace(weights, CFG, np.asarray(XS[0]))
    assert_close(ys[0], exact["OUT"], MAX_REL["layer_worst"])
    assert_close(state.S[0], exact["S"][-1], MAX_REL["layer"])


@pytest.mark.parametrize("kind", ["int4", "bfloat16"])
def test_int4_and_half_weights(kind: str) -> None:
    def smaller(w: jax.Array) -> Any:
        return gdn.quantize_q4(w) if kind == "int4" else w.astype(jnp.bfloat16)

    changed = {name: smaller(getattr(PARAMS, name)) for name in LARGE}
    params = dataclasses.replace(PARAMS, **changed)
    wide = {
        n: np.asarray(gdn.dequantize(w) if kind == "int4" else w.astype(jnp.float32))
        for n, w in changed.items()
    }
    ys, _ = prefill(params, gdn.init_state(CFG, 2), XS, CFG)
    exact = oracle.layer_trace(WEIGHTS | wide, CFG, np.asarray(XS[1]))
    assert_close(ys[1], exact["OUT"], MAX_REL["layer_worst"])


def test_it_is_what_transformers_computes_at_once() -> None:
    path = shipped_oracle("tiny")
    assert path is not None
    cfg = gdn.PRESETS["tiny"]
    file = load_oracle(path, cfg)
    params = gdn.GDNParams(**{n: jnp.asarray(x) for n, x in redraw_weights(file).items()})
    ys, state = prefill(params, gdn.init_state(cfg), jnp.asarray(file.xs)[None], cfg)
    assert_close(ys[0], file.one_shot["OUT"], 1e-5)
    assert_close(ys[0], file.trace["OUT"], 1e-5)
    assert_close(state.S[0], file.trace["S"], 1e-5)


@pytest.mark.slow
def test_a_prefill_in_a_jit_with_the_state_donated_and_its_gradient() -> None:
    def loss(params: gdn.GDNParams, run: Any) -> jax.Array:
        ys, state = run(params, gdn.init_state(CFG, 2), XS[:, :20], CFG)
        return jnp.sum(ys * ys) + jnp.sum(state.S)

    found, wanted = (jax.jit(jax.grad(functools.partial(loss, run=run)))(PARAMS)
                     for run in (gdn.prefill, gdn.decode))  # fmt: skip
    for name, x in vars(found).items():
        assert_close(x, np.asarray(getattr(wanted, name)), 5e-5, name)


def test_what_is_refused() -> None:
    state = gdn.init_state(CFG, 2)

    def refuse(*fragments: str, xs: Any = XS, **options: Any) -> None:
        call = functools.partial(gdn.prefill, PARAMS, state, xs, CFG, **options)
        assert_refused(call, *fragments, error=gdn.ShapeError)

    refuse("prefill", "T >= 1", xs=XS[:, :0])
    refuse("prefill", "D=64", xs=XS[..., :32])
    refuse("prefill", "lengths", "B=2", lengths=jnp.asarray([3], jnp.int32))
    refuse("lengths are [ 3 71]", "0 to 70", lengths=jnp.asarray([3, 71], jnp.int32))
    refuse("chunk_size is 48", chunk_size=48)
    with pytest.raises(gdn.BackendUnavailableError, match="no CUDA GPU"):
        gdn.prefill(PARAMS, state, XS, CFG, backend="pallas")
