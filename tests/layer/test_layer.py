"""The composed layer against float64, operator by operator, and the mistakes that must show."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.layer import steps
from gdn_jax.layer.compose import forward
from gdn_jax.verify.draw import draw_inputs
from tests.support.cases import LAYER, LayerCase, layer_inputs
from tests.support.tools import (
    MAX_REL,
    assert_close,
    assert_same_bits,
    decode,
    decode_step,
    layer,
    max_rel,
    trace_step,
)

CASE = LAYER["tiny"]


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """Every operator in float64, [B, T, ..]."""
    weights, xs, state = layer_inputs(LAYER[name])
    rows = [
        oracle.layer_trace(
            weights, LAYER[name].cfg, x, S=state["S"][b], conv_hist=state["conv_hist"][b]
        )
        for b, x in enumerate(xs)
    ]
    return {entry: np.stack([row[entry] for row in rows]) for entry in rows[0]}


@pytest.mark.parametrize("name", LAYER)
def test_every_operator_agrees_with_float64(name: str) -> None:
    """Token by token, each operator against its own largest value, each head of S and ON too."""
    params, state, xs = layer(LAYER[name])
    for t in range(LAYER[name].T):
        y, state, trace = trace_step(params, state, xs[:, t], LAYER[name].cfg)
        for entry, found in trace.items():
            ref = reference(name)[entry][:, t]
            assert_close(found, ref, MAX_REL["layer"], f"{entry} at token {t}")
            if entry in ("S", "ON"):
                for h in range(found.shape[1]):
                    assert_close(found[:, h], ref[:, h], MAX_REL["layer_worst"], f"{entry}[{h}]")
        assert_same_bits((y, state), (trace["OUT"], gdn.GDNState(trace["S"], trace["HIST"])))


@pytest.mark.parametrize("name", ["tiny", "tiny_wide", "k64_v128_w3", "nine_rows"])
def test_decode_and_steps_and_trace_agree_bit_for_bit(name: str) -> None:
    """One program of T tokens, T programs of one, and T with every operator read back."""
    cfg = LAYER[name].cfg
    params, start, xs = layer(LAYER[name])
    ys, end = decode(params, start, xs, cfg)
    state = start
    for t in range(LAYER[name].T):
        y, traced_state, _ = trace_step(params, state, xs[:, t], cfg)
        y_step, state = decode_step(params, state, xs[:, t], cfg)
        assert_same_bits((y, traced_state), (y_step, state))
        assert_same_bits(y_step, ys[:, t])
    assert_same_bits(state, end)


def test_unjitted_call_agrees() -> None:
    """Nothing but the compiler's freedom in rounding lies between; the barriers take that too."""
    params, state, xs = layer(CASE)
    eager = gdn.decode_step(params, state, xs[:, 0], CASE.cfg)
    assert_close(eager[0], reference("tiny")["OUT"][:, 0], MAX_REL["layer"])
    assert_close(eager[1].S, reference("tiny")["S"][:, 0], MAX_REL["layer"])


def test_half_precision_weights_are_used_in_float32() -> None:
    """Equal in every bit to the same weights widened beforehand."""
    params, state, xs = layer(CASE)
    weights = layer_inputs(CASE)[0]
    dtypes = dict(in_proj_qkv=jnp.bfloat16, in_proj_z=jnp.float16, out_proj=jnp.bfloat16)
    half = {name: jnp.asarray(weights[name], dtype) for name, dtype in dtypes.items()}
    wide = {name: w.astype(jnp.float32) for name, w in half.items()}
    half_out = decode_step(dataclasses.replace(params, **half), state, xs[:, 0], CASE.cfg)
    wide_out = decode_step(dataclasses.replace(params, **wide), state, xs[:, 0], CASE.cfg)
    assert half_out[0].dtype == jnp.float32
    assert_same_bits(half_out, wide_out)


def test_drift_over_512_tokens() -> None:
    case = LayerCase(CASE.cfg, 1, 512)
    weights, xs, _ = layer_inputs(case)
    params, state, _ = layer(case)
    ys, end = decode(params, state, jnp.asarray(xs), case.cfg)
    ref = oracle.layer_trace(weights, case.cfg, xs[0])
    worst = max(max_rel(ys[0, t], ref["OUT"][t]) for t in range(512))
    assert worst <= MAX_REL["layer_worst"]
    assert_close(end.S[0], ref["S"][-1], MAX_REL["layer"])


def test_decay_of_one_and_of_almost_zero_are_reached() -> None:
    """The cases at both ends are what their names say."""
    decays = {name: np.exp(reference(name)["G"]) for name in ("no_decay", "strong_decay")}
    assert (decays["no_decay"] == 1.0).all()
    assert decays["strong_decay"].max() < 1e-3
    saturated = reference("saturated_softplus")
    assert saturated["A"].min() + 100.0 > 89.0
    assert (np.exp(saturated["G"]) > 0.3).all()


def swap_b_and_a(params, monkeypatch):
    return dataclasses.replace(params, in_proj_b=params.in_proj_a, in_proj_a=params.in_proj_b)


def norm_weight_plus_one(params, monkeypatch):
    return dataclasses.replace(params, norm_weight=params.norm_weight + 1.0)


def taps_newest_first(params, monkeypatch):
    return dataclasses.replace(params, conv_weight=params.conv_weight[:, ::-1])


def replace_step(monkeypatch, name, wrong):
    monkeypatch.setattr(steps, name, functools.partial(wrong, getattr(steps, name)))


def decay_taken_as_its_logarithm(params, monkeypatch):
    def wrong(right, q, k, v, g, beta, S):
        return right(q, k, v, jnp.exp(g), beta, S)

    replace_step(monkeypatch, "delta_rule", wrong)
    return params


def history_of_outputs(params, monkeypatch):
    def wrong(right, qkv, hist, weight):
        out, new = right(qkv, hist, weight)
        return out, new.at[..., -1, :].set(out)

    replace_step(monkeypatch, "causal_conv", wrong)
    return params


def q_scaled_twice(params, monkeypatch):
    def wrong(right, q, k):
        q, k = right(q, k)
        return q * q.shape[-1] ** -0.5, k

    replace_step(monkeypatch, "normalise_qk", wrong)
    return params


def key_heads_tiled(params, monkeypatch):
    def wrong(right, q, k, v, g, beta, S):
        tiled = (jnp.concatenate([x, x], axis=-2) for x in (q, k))
        return right(*tiled, v, g, beta, S)

    replace_step(monkeypatch, "delta_rule", wrong)
    return params


def output_read_before_the_update(params, monkeypatch):
    def wrong(right, q, k, v, g, beta, S):
        decayed = right(q, k, v, g, jnp.zeros_like(beta), S)
        return decayed[0], right(q, k, v, g, beta, S)[1]

    replace_step(monkeypatch, "delta_rule", wrong)
    return params


def state_not_decayed(params, monkeypatch):
    def wrong(right, q, k, v, g, beta, S):
        return right(q, k, v, jnp.zeros_like(g), beta, S)

    replace_step(monkeypatch, "delta_rule", wrong)
    return params


MISTAKES = [
    swap_b_and_a,
    norm_weight_plus_one,
    taps_newest_first,
    decay_taken_as_its_logarithm,
    history_of_outputs,
    q_scaled_twice,
    key_heads_tiled,
    output_read_before_the_update,
    state_not_decayed,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_shows_by_far(mistake, monkeypatch) -> None:
    """Planted in the layer, each moves some operator within three tokens by 10 % or more.

    Not always OUT: the gated norm takes the scale of q out again.
    """
    params, state, xs = layer(CASE)
    params = mistake(params, monkeypatch)
    run = jax.jit(lambda state, x: forward(params, state, x, CASE.cfg)[1:])
    worst = 0.0
    for t in range(3):
        state, trace = run(state, xs[:, t])
        distances = [max_rel(x, reference("tiny")[name][:, t]) for name, x in trace.items()]
        worst = max(worst, *distances)
    assert worst > 0.1


def test_draws_of_inputs_do_not_depend_on_their_number() -> None:
    assert_same_bits(draw_inputs(CASE.cfg, 7, 3)[:2], draw_inputs(CASE.cfg, 2, 3))
