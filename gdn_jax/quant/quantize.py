"""From float weights to int4, on the host."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import FLOATS, check_array
from gdn_jax.errors import QuantizationError, ShapeError, UnknownNameError
from gdn_jax.quant.q4array import GROUP, Q4Array

_BLOCK = 2**20
"""Weights in one block of rows; with fewer, threads wait for each other between NumPy's calls."""

_CANDIDATES = np.array([-8, -9.5, -9, -8.5, -7.5, -7, -6.5, 5.5, 6, 6.5, 7, 7.5, 8], np.float32)
"""What to try as the value of largest magnitude, before rounding and clipping."""

Integers = np.ndarray
Scales = np.ndarray


def quantize_q4(
    array: Any, rule: str = "q4_0", *, progress: Callable[[int, int], None] | None = None
) -> Q4Array:
    """Quantise weights [N, K] to 4-bit integers with a float16 scale for each 32 columns.

    Each group of 32 columns of a row is quantised by itself. Let ``m`` be its value of largest
    magnitude, the first if several have the same:

    - ``"q4_0"``, the rule of GGUF, bit for bit: ``d = m / -8``, ``scale = float16(d)`` and
      ``integer = clip(floor(x · (1/d) + 8.5) - 8, -8, 7)`` in float32. The integers are taken with
      the unrounded d, so where d is too small for float16 they may be nonzero under a scale of
      zero. Where 1/d is beyond float32 they are zero, a case that GGUF leaves undefined.
    - ``"mse"``, least squares: each of several values tried for m gives integers ``n``, with the
      best scale ``<x, n> / <n, n>`` rounded to float16; the try with the smallest squared error is
      rounded and fitted once more. A group keeps the result of ``"q4_0"`` unless this is better.

    A scale takes the sign of -m or m. Below 2**-14 it is subnormal and keeps fewer bits. An
    all-zero group has integers 0 and the scale 0/-8, which is -0 as in GGUF.

    Runs in NumPy, on blocks of rows in threads.

    Args:
        array: float32, bfloat16 or float16, NumPy or JAX; computed in float32.
        rule: ``"q4_0"`` or ``"mse"``.
        progress: called as ``progress(rows done, rows)`` after each block.

    Returns:
        The weights on the default device.

    Raises:
        ShapeError: another rank or dtype, no rows, or K not a positive multiple of 32.
        UnknownNameError: no such rule.
        QuantizationError: NaN, infinity, or a scale beyond float16, with the row and the group.
    """
    where = "quantize_q4"
    check_array(where, "array", array, [("N", None), ("K", None)], FLOATS)
    N, K = array.shape
    if not N or not K or K % GROUP:
        raise ShapeError(f"{where}: array has shape {(N, K)}; needed K a multiple of {GROUP}")
    if rule not in RULES:
        raise UnknownNameError(f"{where}: no rule {rule!r}; there are {', '.join(RULES)}")
    host, rows = np.asarray(array), max(1, _BLOCK // K)

    def block(first: int) -> tuple[np.ndarray, Scales]:
        return quantized_rows(host[first : first + rows], rule, first)

    packed, scales = np.empty((N, K // 8), np.int32), np.empty((N, K // GROUP), np.float16)
    with ThreadPoolExecutor() as pool:
        for first, done in zip(range(0, N, rows), pool.map(block, range(0, N, rows)), strict=True):
            part = slice(first, first + rows)
            packed[part], scales[part] = done
            if progress:
                progress(min(first + rows, N), N)
    return Q4Array(jnp.asarray(packed), jnp.asarray(scales))


def quantized_rows(x: np.ndarray, rule: str = "q4_0", first: int = 0) -> tuple[np.ndarray, Scales]:
    """:func:`quantize_q4` of rows from ``first`` on, in this thread: words and scales on the host.

    Raises:
        QuantizationError: as :func:`quantize_q4`.
    """
    K = x.shape[1]
    groups = x.astype(np.float32, order="C").reshape(-1, GROUP)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        integers, scales = RULES[rule](groups)
    _check_groups(groups, scales, first, K // GROUP)
    return _pack(integers).reshape(-1, K // 8), scales.reshape(-1, K // GROUP)


def _check_groups(groups: np.ndarray, scales: Scales, first_row: int, width: int) -> None:
    bad = ~np.isfinite(scales)
    if bad.any():
        i = int(np.argmax(bad))
        row, group = first_row + i // width, i % width
        place = f"row {row}, group {group} (columns {GROUP * group} to {GROUP * group + GROUP - 1})"
        largest = groups[i][np.argmax(np.abs(groups[i]))]
        if np.isfinite(largest):
            needed = "a scale within float16, so at most 8 · 65504"
        else:
            needed = "finite numbers"
        raise QuantizationError(f"quantize_q4: {place} holds {largest}; needed {needed}")


def _pack(integers: Integers) -> np.ndarray:
    """int8 [.., 32] -> int32 [.., 4]: byte j holds column j low and column j + 16 high."""
    nibbles = integers.view(np.uint8) & 15
    return (nibbles[:, :16] | nibbles[:, 16:] << 4).view("<i4").astype(np.int32, copy=False)


def _largest(x: np.ndarray) -> np.ndarray:
    """The value of largest magnitude of each group, [G, 1]; NaN if the group holds one."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)


def _inverse(d: np.ndarray) -> np.ndarray:
    inverse = 1 / d
    return np.where(np.isfinite(inverse), inverse, 0)


def _q4_0(x: np.ndarray) -> tuple[Integers, Scales]:
    d = _largest(x) / -8
    offset = x * _inverse(d)
    offset += np.float32(8.5)
    integers = np.minimum(offset.astype(np.int8), 15) - np.int8(8)
    return integers, d.astype(np.float16)


def _fit(x: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best float16 scale for integers n, both as float32, and how much it lowers sum(x²)."""
    xn, nn = (np.einsum("gk,gk->g", a, n)[:, None] for a in (x, n))
    scale = (xn / nn).astype(np.float16).astype(np.float32)
    return scale, scale * (2 * xn - scale * nn)


def _round(x: np.ndarray) -> np.ndarray:
    np.rint(x, out=x)
    return np.clip(x, -8, 7, out=x)


def _error(x: np.ndarray, integers: Integers, scales: Scales) -> np.ndarray:
    residual = x - integers * scales.astype(np.float64)
    return np.einsum("gk,gk->g", residual, residual)[:, None]


def _mse(x: np.ndarray) -> tuple[Integers, Scales]:
    plain, plain_scales = _q4_0(x)
    unit = x / _largest(x)
    best, gain = np.zeros((len(x), 1), np.float32), np.zeros((len(x), 1), np.float32)
    for candidate in _CANDIDATES:
        scale, lowers = _fit(x, _round(unit * candidate))
        better = lowers > gain
        best, gain = np.where(better, scale, best), np.where(better, lowers, gain)
    best, _ = _fit(x, _round(x * _inverse(best)))
    integers = _round(x * _inverse(best)).astype(np.int8)
    scales = best.astype(np.float16)
    keep = ~(_error(x, integers, scales) < _error(x, plain, plain_scales))
    return np.where(keep, plain, integers), np.where(keep, plain_scales, scales)


RULES: dict[str, Callable[[np.ndarray], tuple[Integers, Scales]]] = {"q4_0": _q4_0, "mse": _mse}
"""Quantising rules: groups float32 [G, 32] -> integers int8 [G, 32] and scales float16 [G, 1]."""
