"""float16 to float32, bit for bit: the reference for the device's own conversion."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PATTERNS = np.arange(2**16, dtype=np.uint16)
"""Every float16."""


@dataclasses.dataclass(frozen=True)
class F16Conversion:
    """How the device's conversion differs from the reference over all 65 536 patterns.

    ``unequal`` counts patterns whose result is another number, or NaN for a number or a number for
    NaN; signed zeros are two numbers. NaNs that stay NaN are counted apart, since hardware may
    choose their bits: ``nan_sign`` those of the other sign, ``nan_payload`` those of the same sign
    and another payload.
    """

    unequal: int
    nan_sign: int
    nan_payload: int


def f16_to_f32_bits(half: np.ndarray) -> np.ndarray:
    """float32 bits, uint32, of float16 bits, uint16, in integer arithmetic alone.

    With sign, exponent ``e`` and fraction ``f`` of the float16:

    - ``0 < e < 31``: exponent ``e + 112``, fraction ``f·2**13``;
    - ``e = 31``: exponent 255, fraction ``f·2**13``: infinity, or NaN with its payload;
    - ``e = 0``: ``±f·2**-24``; with p the position of f's highest bit, exponent ``p + 103`` and
      fraction ``(f - 2**p)·2**(23 - p)``; a zero of the same sign when f is 0.
    """
    half = half.astype(np.uint32)
    sign, e, f = half >> 15 << 31, half >> 10 & 31, half & 1023
    p = np.sum(f[..., None] >> np.arange(1, 10, dtype=np.uint32) > 0, axis=-1, dtype=np.uint32)
    subnormal = np.where(f > 0, (p + 103 << 23) | (f << 23 - p & 0x7FFFFF), 0)
    exponent = np.where(e == 31, 255, e + 112)
    return sign | np.where(e == 0, subnormal, exponent << 23 | f << 13)


def compare_f16_bits(found: np.ndarray) -> F16Conversion:
    """Compare the float32 bits of every pattern, uint32 [65536], with the reference."""
    expected = f16_to_f32_bits(PATTERNS)
    differs, nan = found != expected, _is_nan(found) & _is_nan(expected)
    sign = found >> 31 != expected >> 31
    counts = (differs & ~nan, nan & sign, differs & nan & ~sign)
    return F16Conversion(*(int(np.sum(count)) for count in counts))


def check_f16_convert() -> F16Conversion:
    """Run every pattern through the default device's conversion, compiled, and compare."""
    return compare_f16_bits(np.asarray(jax.jit(_device_bits)(PATTERNS)))


def _device_bits(half: jax.Array) -> jax.Array:
    value = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    return lax.bitcast_convert_type(value, jnp.uint32)


def _is_nan(bits: np.ndarray) -> np.ndarray:
    return bits & 0x7FFFFFFF > 0x7F800000
