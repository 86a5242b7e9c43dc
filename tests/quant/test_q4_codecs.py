"""The exchange layouts: lossless, laid out as documented, and strict about their bytes."""

from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn_jax as gdn
from tests.quant.test_q4_array import dequantize, random_q4
from tests.support.tools import assert_refused, assert_same_bits

Q4_0 = gguf.GGMLQuantizationType.Q4_0
CODECS: dict[str, Any] = {
    "gguf": (gdn.q4_to_gguf_blocks, gdn.q4_from_gguf_blocks),
    "tiles": (gdn.q4_to_tiles, gdn.q4_from_tiles),
}


@pytest.mark.parametrize("codec", CODECS)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 3), groups=st.integers(1, 3))
def test_any_weights_come_back(codec: str, seed: int, blocks: int, groups: int):
    encode, decode = CODECS[codec]
    w = random_q4(seed, 4 * blocks, 32 * groups)
    raw = encode(w)
    assert raw.dtype == np.uint8
    assert_same_bits(decode(raw, w.shape), w)
    assert_same_bits(decode(raw.reshape(-1), w.shape), w)


@pytest.mark.parametrize("codec", CODECS)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_come_back(codec: str, seed: int):
    """Any bytes are some weights, scales that are NaN or infinite among them."""
    encode, decode = CODECS[codec]
    size = len(encode(random_q4(0, 8, 96)).reshape(-1))
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    assert_same_bits(encode(decode(raw, (8, 96))).reshape(-1), raw)


@given(seed=st.integers(0, 2**32 - 1), rows=st.sampled_from([1, 7]))
def test_gguf_blocks_are_those_of_gguf(seed: int, rows: int):
    """Decoded here and by the gguf package from the same bytes; rows need no multiple of 4."""
    w = random_q4(seed, rows, 96)
    raw = gdn.q4_to_gguf_blocks(w)
    assert raw.shape == (rows, 54)
    assert_same_bits(dequantize(w), gguf.quants.dequantize(raw, Q4_0))
    back = gdn.q4_from_gguf_blocks(raw, (rows, 96))
    assert_same_bits(dequantize(back), gguf.quants.dequantize(raw, Q4_0))


def test_gguf_bytes_of_one_group():
    raw = np.zeros(18, np.uint8)
    raw[:2] = 0x00, 0x3C
    raw[2:] = 0x88
    raw[2 + 3] = 0xF0
    values = np.asarray(dequantize(gdn.q4_from_gguf_blocks(raw, (1, 32))))[0]
    assert values[3] == -8
    assert values[3 + 16] == 7
    assert np.count_nonzero(values) == 2


def test_tile_bytes():
    """Of 8 × 64 weights, the value of row 6 and column 51 alone: third tile, third row."""
    raw = np.zeros((2, 2 * 72), np.uint8)
    tile = raw[1, 72:]
    tile[2 * 2 : 2 * 2 + 2] = 0x00, 0xC0
    tile[8 + 2 * 16 + 3] = 0x9 << 4
    w = gdn.q4_from_tiles(raw, (8, 64))
    values = np.asarray(dequantize(w))
    assert values[6, 32 + 19] == -7 * -2.0
    assert np.count_nonzero(values) == 1
    assert_same_bits(gdn.q4_to_tiles(w), raw)


def test_between_the_layouts():
    x = np.random.default_rng(1).standard_normal((12, 64)).astype(np.float32)
    raw = gguf.quants.quantize(x, Q4_0)
    tiles = gdn.q4_to_tiles(gdn.q4_from_gguf_blocks(raw, x.shape))
    assert_same_bits(gdn.q4_to_gguf_blocks(gdn.q4_from_tiles(tiles, x.shape)), raw)


@pytest.mark.parametrize("codec", CODECS)
def test_refusals(codec: str):
    encode, decode = CODECS[codec]
    w = random_q4(2, 4, 64)
    raw = encode(w)
    bytes_needed = f"{raw.size} bytes"
    for wrong in (raw[:, :-1], raw.reshape(-1)[1:], np.zeros(0, np.uint8)):
        assert_refused(
            lambda wrong=wrong: decode(wrong, w.shape), f"{wrong.size} bytes", bytes_needed
        )
    assert_refused(lambda: decode(raw.reshape(2, -1), w.shape), "raw has shape (2,", bytes_needed)
    assert_refused(lambda: decode(raw.astype(np.int8), w.shape), "raw is of int8", "uint8")
    assert_refused(lambda: decode(raw.tobytes(), w.shape), "raw is a bytes", "uint8")
    assert_refused(lambda: decode(raw, (4, 72)), "shape is (4, 72)", "multiple of 32")
    assert_refused(lambda: decode(raw, (4, -64)), "shape is (4, -64)")
    assert_refused(lambda: decode(raw, (256,)), "shape is (256,)", "(N, K)")
    assert_refused(lambda: decode(raw, 256), "shape is 256")
    assert_refused(lambda: encode(gdn.dequantize(w)), "needed a gdn_jax.Q4Array")
    assert_refused(lambda: encode(random_q4(0, 2, 4, 32)), "w.scales has shape (2, 4, 1)")


def test_tiles_need_whole_tiles():
    assert_refused(lambda: gdn.q4_to_tiles(random_q4(0, 6, 32)), "N is 6", "multiple of 4")
    raw = np.zeros(72, np.uint8)
    assert_refused(lambda: gdn.q4_from_tiles(raw, (3, 32)), "N is 3", "multiple of 4")


def test_device_arrays_are_taken():
    w = random_q4(3, 4, 32)
    raw = jnp.asarray(gdn.q4_to_gguf_blocks(w))
    assert_same_bits(gdn.q4_from_gguf_blocks(raw, (4, 32)), w)
