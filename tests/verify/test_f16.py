"""float16 to float32: the bit-level reference and the device."""

import jax.numpy as jnp
import numpy as np

import gdn_jax as gdn
from gdn_jax.verify.layer import f16
from gdn_jax.verify.layer.f16 import PATTERNS, check_f16_convert, compare_f16_bits, f16_to_f32_bits


def bits(pattern: int) -> int:
    return int(f16_to_f32_bits(np.array(pattern, np.uint16)))


def test_reference_by_hand():
    assert bits(0x0000) == 0x00000000
    assert bits(0x8000) == 0x80000000
    assert bits(0x3C00) == 0x3F800000
    assert bits(0xC000) == 0xC0000000
    assert bits(0x7BFF) == 0x477FE000
    assert bits(0x0400) == 0x38800000
    assert bits(0x0001) == 0x33800000
    assert bits(0x8001) == 0xB3800000
    assert bits(0x03FF) == 0x387FC000
    assert bits(0x0200) == 0x38000000
    assert bits(0x7C00) == 0x7F800000
    assert bits(0xFC00) == 0xFF800000
    assert bits(0x7E00) == 0x7FC00000
    assert bits(0xFD55) == 0xFFAAA000


def test_reference_against_numpy():
    """NumPy keeps even the payload of a signalling NaN."""
    expected = PATTERNS.view(np.float16).astype(np.float32).view(np.uint32)
    assert np.array_equal(f16_to_f32_bits(PATTERNS), expected)
    assert f16_to_f32_bits(PATTERNS).dtype == np.uint32


def test_the_device_converts_every_pattern():
    found = check_f16_convert()
    assert found.unequal == 0
    # Of the 1023 NaNs of each sign, some processors make the signalling ones quiet and others make
    # all of them one positive NaN.
    assert found.nan_sign + found.nan_payload <= 2 * 1023


def test_differences_are_counted():
    found = f16_to_f32_bits(PATTERNS)
    found[0x3C00] ^= 1
    found[0x8000] ^= 0x80000000
    found[0x7E00] ^= 0x80000000
    found[0xFE00] ^= 1
    assert compare_f16_bits(found) == f16.F16Conversion(unequal=2, nan_sign=1, nan_payload=1)


def test_scales_are_converted_so_in_dequantize():
    """The integer 1 under every scale gives that scale."""
    scales = PATTERNS.view(np.float16)
    packed = jnp.full((len(scales), 4), 0x11111111, jnp.int32)
    found = gdn.dequantize(gdn.Q4Array(packed, jnp.asarray(scales.reshape(-1, 1))))
    assert compare_f16_bits(np.asarray(found).view(np.uint32)[:, 0]).unequal == 0
