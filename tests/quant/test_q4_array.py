"""The int4 array: its equations, its exactness, its sizes, and what it refuses."""

import dataclasses
import math

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.layer.params import LARGE, param_dims
from tests.support.tools import assert_refused, assert_same_bits

dequantize = jax.jit(gdn.dequantize, static_argnames="dtype")


def random_q4(seed: int, *shape: int) -> gdn.Q4Array:
    """Any nibbles under any finite scales, subnormal and of both signs."""
    rng = np.random.default_rng(seed)
    *rows, K = shape
    packed = rng.integers(-(2**31), 2**31, (*rows, K // 8), dtype=np.int32)
    bits = rng.integers(0, 31 << 10, (*rows, K // 32), dtype=np.uint16)
    bits |= rng.integers(0, 2, bits.shape, dtype=np.uint16) << np.uint16(15)
    return gdn.Q4Array(jnp.asarray(packed), jnp.asarray(bits.view(np.float16)))


def by_the_equations(w: gdn.Q4Array) -> np.ndarray:
    """The value of every weight, one at a time, in float64."""
    packed, scales = np.asarray(w.packed), np.asarray(w.scales).astype(np.float64)
    values = np.empty(w.shape)
    for n, k in np.ndindex(*w.shape):
        g, h, i, b = k // 32, k % 32 // 16, k % 16 // 4, k % 4
        nibble = (int(packed[n, 4 * g + i]) >> (4 * h + 8 * b)) & 15
        values[n, k] = (nibble - 16 * (nibble > 7)) * scales[n, g]
    return values


def test_dequantize_is_the_equation_exactly():
    w = random_q4(0, 5, 96)
    found = np.asarray(dequantize(w))
    assert found.dtype == np.float32
    assert np.array_equal(found.astype(np.float64), by_the_equations(w))
    decoded = gguf.quants.dequantize(gdn.q4_to_gguf_blocks(w), gguf.GGMLQuantizationType.Q4_0)
    assert_same_bits(found, decoded)


def test_all_integers_under_every_scale():
    """Exact in float32 for every finite float16 scale and every nibble."""
    scales = np.arange(2**16, dtype=np.uint16).view(np.float16)
    scales = scales[np.isfinite(scales)]
    packed = np.tile(np.array([0x76543210, 0xFEDCBA98, 0, 0], np.uint32).view(np.int32), (1, 1))
    w = gdn.Q4Array(jnp.broadcast_to(packed, (len(scales), 4)), jnp.asarray(scales.reshape(-1, 1)))
    found = np.asarray(dequantize(w)).astype(np.float64)
    integers = by_the_equations(gdn.Q4Array(jnp.asarray(packed), jnp.ones((1, 1), jnp.float16)))
    assert set(integers[0]) == set(range(-8, 8))
    assert np.array_equal(found, integers * scales.astype(np.float64)[:, None])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dequantize_rounds_once(dtype: jnp.dtype):
    w = gdn.quantize_q4(np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32))
    expected = np.asarray(dequantize(w)).astype(dtype)
    assert_same_bits(dequantize(w, dtype), expected)
    beyond = dataclasses.replace(w, scales=jnp.full((6, 2), 65504.0, jnp.float16))
    assert np.isfinite(np.asarray(dequantize(beyond))).all()
    assert np.isinf(np.asarray(dequantize(beyond, jnp.float16))).any()


@pytest.mark.parametrize("lead", [(3,), (2, 2)])
def test_a_stack_is_its_members(lead: tuple[int, ...]):
    w = random_q4(4, *lead, 4, 64)
    assert w.shape == (*lead, 4, 64)
    assert w.ndim == len(lead) + 2
    whole = dequantize(w)
    for index in np.ndindex(*lead):
        member = jax.tree.map(lambda x, index=index: x[index], w)
        assert_same_bits(whole[index], dequantize(member))
    assert_same_bits(jax.jit(jax.vmap(gdn.dequantize))(w), whole)
    _, scanned = jax.lax.scan(lambda carry, w: (carry, gdn.dequantize(w)), 0, w)
    assert_same_bits(scanned, whole)


def test_sizes_of_a_27b_layer():
    cfg = gdn.PRESETS["qwen3.5-27b"]
    shapes = {name: [size for _, size in param_dims(cfg)[name]] for name in LARGE}

    def zeros(N: int, K: int) -> gdn.Q4Array:
        packed = jnp.zeros((N, K // 8), jnp.int32)
        return gdn.Q4Array(packed, jnp.zeros((N, K // 32), jnp.float16))

    arrays = [jax.eval_shape(lambda shape=shape: zeros(*shape)) for shape in shapes.values()]
    weights = sum(math.prod(shape) for shape in shapes.values())
    assert [list(w.shape) for w in arrays] == list(shapes.values())
    assert sum(w.nbytes for w in arrays) == weights * 9 // 16
    assert round(sum(w.nbytes for w in arrays) / 2**20, 1) == 61.9
    assert 4 * weights / 2**20 == 440


def test_nbytes_are_those_of_the_buffers():
    w = random_q4(2, 3, 64)
    assert w.nbytes == np.asarray(w.packed).nbytes + np.asarray(w.scales).nbytes


def test_refusals():
    w = random_q4(3, 4, 64)
    assert_refused(
        lambda: gdn.dequantize(jnp.zeros((4, 64))),  # pyright: ignore[reportArgumentType]
        "w is a ArrayImpl",
        "needed a gdn_jax.Q4Array",
    )
    short = dataclasses.replace(w, packed=w.packed[:, :-1])
    assert_refused(lambda: gdn.dequantize(short), "w.packed has shape (4, 7)", "K/8=8")
    fewer = dataclasses.replace(w, packed=w.packed[:3])
    assert_refused(lambda: gdn.dequantize(fewer), "w.packed has shape (3, 8)", "N=4")
    wide = dataclasses.replace(w, scales=w.scales.astype(jnp.float32))
    assert_refused(lambda: gdn.dequantize(wide), "w.scales has", "float32", "float16")
    unsigned = dataclasses.replace(w, packed=w.packed.astype(jnp.uint32))
    assert_refused(lambda: gdn.dequantize(unsigned), "w.packed has", "uint32", "int32")
    flat = gdn.Q4Array(w.packed[0], w.scales[0])
    assert_refused(lambda: gdn.dequantize(flat), "w.scales has shape (2,)", "K/32")
    assert_refused(lambda: gdn.dequantize(w, jnp.int32), "dtype is int32", "bfloat16")
    absent = dataclasses.replace(w, packed=None)
    assert_refused(lambda: gdn.dequantize(absent), "w.packed is a NoneType")
