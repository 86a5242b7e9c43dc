"""A model's forward on both backends: idle rows, the room, int4, and what runs on the GPU."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import gdn_jax as gdn
from gdn_jax.models import attention, kernels
from gdn_jax.models import route as routes
from gdn_jax.models.cache import ModelCache, check_room
from gdn_jax.models.forward import forward, forward_by_block
from gdn_jax.models.generation import device
from gdn_jax.models.generation.sampling import Sampling
from gdn_jax.models.kernels import lay_out
from gdn_jax.models.route import Call, Route
from pallas_kernels import joint
from pallas_kernels import layer as layer_kernels
from pallas_kernels.kernels import attention_inputs, float_gemv, residual_norm
from tests.support.drawn_model import CFG, drawn, over_matrices
from tests.support.tools import (
    MAX_REL,
    assert_close,
    assert_refused,
    assert_same_bits,
    pretend_device,
)


def step(
    weights: Any, cache: ModelCache, ids: jax.Array, lengths: Any = None, **options: Any
) -> tuple[jax.Array, ModelCache]:
    """One token a row, [B, vocab] and the cache; the given one is kept."""
    if lengths is not None:
        lengths = jnp.asarray(lengths, jnp.int32)
    call = Call(CFG, logits="last")._replace(**options)
    y, cache = forward_by_block(weights, jax.tree.map(jnp.copy, cache), ids, lengths, call)
    return y, cache


@functools.cache
def params() -> Any:
    return drawn()


@functools.cache
def after_a_prompt(dtype: Any = jnp.float32) -> Any:
    """Two rows of 9 and 5 tokens in a room of 12; their last logits, and the cache."""
    return prompted(params(), dtype)


def prompted(weights: Any, dtype: Any = jnp.float32, **options: Any) -> Any:
    call = Call(CFG, logits="last", fresh=True)._replace(**options)
    lengths = jnp.asarray([9, 5], jnp.int32)
    return forward_by_block(
        weights, ModelCache.zeros(CFG, 2, 12, dtype), tokens(2, 9), lengths, call
    )


@functools.cache
def int4() -> tuple[Any, Any]:
    """A model of dequantised weights, and of these weights as the kernels read them."""
    quantised = over_matrices(gdn.quantize_q4, params())
    wide = over_matrices(gdn.dequantize, quantised)
    return wide, lay_out(quantised)


def tokens(B: int, T: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, CFG.vocab_size, (B, T)), jnp.int32)


def rows(cache: ModelCache, b: int) -> Any:
    states = jax.tree.map(lambda s: s[:, b], cache.states)
    return states, [k[b] for k in (*cache.k, *cache.v)], cache.length[b]


@pytest.mark.slow
def test_an_idle_row_keeps_everything_and_changes_no_other() -> None:
    _, cache = after_a_prompt()
    y, both = step(params(), cache, tokens(2, 1, 1), [1, 1])
    z, one = step(params(), cache, tokens(2, 1, 1), [1, 0])
    assert_same_bits(y[0], z[0])
    assert_same_bits(rows(both, 0), rows(one, 0))
    assert_same_bits(rows(cache, 1), rows(one, 1))
    assert both.length.tolist() == [10, 6]
    assert one.length.tolist() == [10, 5]


def test_a_token_beyond_the_room_is_put_nowhere() -> None:
    _, cache = after_a_prompt()
    full = dataclasses.replace(cache, length=jnp.asarray([12, 5], jnp.int32))
    _, beyond = step(params(), full, tokens(2, 1, 3), [1, 1])
    for name in ("k", "v"):
        found, before = getattr(beyond, name)[0], getattr(full, name)[0]
        assert_same_bits(found[0], before[0])
        assert float(jnp.abs(found[1, :, 5]).max()) > 0
    check_room("generate", 12, 12, "prompt 0")
    assert_refused(
        lambda: check_room("generate", 13, 12, "prompt 0"),
        "generate: prompt 0 needs room for 13 tokens; there is 12",
        error=gdn.GenerationError,
    )


def test_the_reach_changes_only_what_is_looked_at() -> None:
    _, cache = after_a_prompt()
    wide, _ = step(params(), cache, tokens(2, 1, 1), [1, 1])
    short, _ = step(params(), cache, tokens(2, 1, 1), [1, 1], reach=8)
    assert_close(short[1], wide[1], MAX_REL["layer"])
    assert np.abs(np.asarray(short[0] - wide[0])).max() > 1e-3


def test_block_by_block_is_the_whole() -> None:
    _, cache = after_a_prompt()
    y, wanted = step(params(), cache, tokens(2, 1, 1), [1, 1])
    whole = jax.jit(forward, static_argnames="call")
    lengths = jnp.asarray([1, 1], jnp.int32)
    z, found = whole(params(), cache, tokens(2, 1, 1), lengths, Call(CFG))
    assert_close(z[:, 0], y, 2e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b, 2e-6)


@pytest.mark.slow
def test_products_of_rounded_operands_are_near_those_of_float32() -> None:
    _, kernels = int4()
    y, _ = prompted(kernels)
    found, _ = prompted(kernels, route=Route(narrow=True))
    # Twenty products in a row, each operand rounded to 2**-9.
    assert_close(found, y, 3e-2)
    assert np.abs(np.asarray(found - y)).max() > 1e-4


def test_bfloat16_keys_and_values_are_near_float32() -> None:
    (y, cache), (z, narrow) = after_a_prompt(), after_a_prompt(jnp.bfloat16)
    assert narrow.k[0].dtype == jnp.bfloat16
    assert narrow.nbytes < cache.nbytes
    after = (step(params(), c, tokens(2, 1, 1), [1, 1])[0] for c in (cache, narrow))
    for a, b in ((y, z), after):
        # Keys, values, queries and probabilities rounded to 2**-9 in one layer.
        assert_close(b, a, 2e-2)


def test_int4_is_the_model_of_its_dequantised_weights() -> None:
    wide, kernels = int4()
    assert isinstance(kernels.head, gdn.Q4Kernel)
    (y, cache), (z, found) = prompted(wide), prompted(kernels)
    # The same products in float32, in another order of sums.
    assert_close(z, y, 5e-6)
    y, _ = step(wide, cache, tokens(2, 1, 1), [1, 1])
    z, _ = step(kernels, found, tokens(2, 1, 1), [1, 1])
    assert_close(z, y, 5e-6)


INTERPRET = plgpu.InterpretGPUParams()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card without clusters, whose kernels the interpreter runs."""
    pretend_device(monkeypatch, "8.0")
    for module, name in (
        (layer_kernels, "step"),
        (joint, "slices"),
        (float_gemv, "gemv"),
        (attention_inputs, "attention_inputs"),
    ):
        function = functools.partial(getattr(module, name), interpret=INTERPRET)
        monkeypatch.setattr(module, name, function)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_on_the_kernels_is_a_step_on_xla(interpreted: None, monkeypatch, fused) -> None:
    """Fused: the kernel between two blocks too, in one CTA."""
    alone = functools.partial(residual_norm.residual_norm, size=1, interpret=INTERPRET)
    monkeypatch.setattr(residual_norm, "residual_norm", alone)
    monkeypatch.setattr(kernels, "adds_slices", lambda _: fused)
    _, cache = after_a_prompt()
    y, wanted = step(params(), cache, tokens(2, 1, 1), [1, 0])
    z, found = step(params(), cache, tokens(2, 1, 1), [1, 0], route=Route(backend="pallas"))
    assert_close(z[0], y[0], 3e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b, 2e-6)


def cross_lowered(weights: Any, B: int) -> str:
    """The loop over tokens of a model that is twice as deep, for CUDA."""
    cfg = dataclasses.replace(CFG, layer_types=2 * CFG.layer_types)
    weights = dataclasses.replace(weights, blocks=2 * weights.blocks)
    cache = ModelCache.zeros(cfg, B, 16, jnp.bfloat16)
    ones = jnp.ones(B, jnp.int32)
    rows = device.Rows(cache, ones, ones, ones, None)
    keep, stops = jnp.ones(B, bool), jnp.zeros(1, jnp.int32)
    call = Call(cfg, Route(backend="pallas"))
    traced = device.decode.trace(weights, rows, keep, Sampling.of(), stops, call, 4)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "B", "norms"), [("int4", 1, 2), ("int4", 3, 3), ("bfloat16", 2, 2)]
)
def test_a_loop_of_steps_holds_the_kernels_and_copies_no_state(monkeypatch, kind, B, norms) -> None:
    pretend_device(monkeypatch)
    if kind == "int4":
        _, weights = int4()
    else:
        weights = over_matrices(lambda w: w.astype(jnp.bfloat16), params())
    text = cross_lowered(weights, B)
    # Three of a linear layer; q|k|v, what attention takes, o; gate|up, down; the head: each once,
    # however often. A norm for each number of slices, and one before the head, without the stream.
    assert text.count("@mosaic_gpu_v2") == 9 + norms
    S = f"tensor<4x{B}x2x64x128xf32>"
    assert S in text
    moved = re.compile(r"stablehlo\.(slice|dynamic_slice|dynamic_update_slice|gather|scatter|"
                       r"concatenate|select|copy)")  # fmt: skip
    assert not [line for line in text.splitlines() if S in line and moved.search(line)]


def test_which_attention_is_asked_for_what(monkeypatch) -> None:
    """cuDNN has no mask of its own that fits tokens behind others, and reads keys by length."""
    asked = []

    def spy(q, k, v, **options: Any) -> jax.Array:
        asked.append((k.shape[1], options))
        return jnp.zeros_like(q)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    cache = ModelCache.zeros(CFG, 2, 12, jnp.bfloat16)

    def trace(T: int, **options: Any) -> None:
        run = functools.partial(forward, params(), lengths=None, call=Call(CFG, **options))
        jax.eval_shape(run, cache, jax.ShapeDtypeStruct((2, T), jnp.int32))

    trace(3, route=Route(attention="cudnn"), fresh=True)
    trace(3, route=Route(attention="cudnn"), reach=8)
    trace(1, reach=8)
    own, behind, step = asked
    assert own == (3, {"is_causal": True, "implementation": "cudnn"})
    assert (behind[0], set(behind[1]), behind[1]["implementation"]) == (
        *(8, {"mask", "implementation"}, "cudnn"),
    )
    assert (step[0], set(step[1]), step[1]["implementation"]) == (
        *(8, {"mask", "implementation"}, "xla"),
    )
    positions = jnp.asarray([[2, 3], [0, 1]], jnp.int32)
    seen = np.arange(4)[None, None, None] <= np.asarray(positions)[:, None, :, None]
    np.testing.assert_array_equal(attention._seen(positions, 4), seen)
    # An idle row of a full cache asks for no key that is not there.
    k, one = jnp.zeros((2, 2, 4, 8), jnp.bfloat16), jnp.asarray([[2], [4]], jnp.int32)
    q = jnp.zeros((2, 1, 6, 8), jnp.bfloat16)
    assert attention._step(q, k, k, one, 2, Route(attention="cudnn")).shape == q.shape
    keys, options = asked[-1]
    assert (keys, options["implementation"]) == (4, "cudnn")
    assert options["query_seq_lengths"].tolist() == [1, 1, 1, 1]
    assert options["key_value_seq_lengths"].tolist() == [3, 3, 4, 4]


def test_what_cudnn_takes(monkeypatch) -> None:
    assert "no CUDA GPU" in (routes.cudnn_reason(256, jnp.bfloat16) or "")
    pretend_device(monkeypatch)
    assert routes.cudnn_reason(256, jnp.bfloat16) is None
    assert "needs bfloat16" in (routes.cudnn_reason(256, jnp.float32) or "")
    assert "264 wide" in (routes.cudnn_reason(264, jnp.bfloat16) or "")
    pretend_device(monkeypatch, "8.9")
    assert "multiple of 8 up to 128" in (routes.cudnn_reason(256, jnp.bfloat16) or "")


def test_the_route_of_weights(monkeypatch) -> None:
    exchange = over_matrices(gdn.quantize_q4, params())

    def backend(weights: Any, named: str | None = None) -> str:
        return Route.choose(weights, CFG, named, jnp.float32).backend

    assert backend(params()) == "xla"
    with pytest.raises(gdn.BackendUnavailableError, match="no CUDA GPU"):
        backend(params(), "pallas")
    pretend_device(monkeypatch)
    assert (backend(params()), backend(exchange)) == ("pallas", "xla")
    with pytest.raises(gdn.BackendUnavailableError, match="not laid out for the kernels"):
        backend(exchange, "pallas")
    assert backend(lay_out(exchange)) == "pallas"
