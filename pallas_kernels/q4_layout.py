"""The memory layout that the int4 kernel reads, from the exchange form and back.

The exchange form is words int32 [.., N, K/8] and scales float16 [.., N, K/32]: with the column
``k = 32·g + 16·h + 4·i + b``, the integer of (n, k) is the two's complement nibble of
``words[n, 4·g + i]`` at bit ``4·h + 8·b``.

A block holds 64 rows × 64 columns in 2304 contiguous bytes. With the row
``n = 64·t + 16·m + 8·a + r`` (m in 0..3, a in 0..1, r in 0..7) and the group ``g = 2·p + c``::

    flat(blocks[t, p])[128·m + 16·r + 4·i + 2·c + a] = words[n, 4·g + i]
    flat(blocks[t, p])[512 +  16·m + 2·r + c]        = bits(scales[n]) | bits(scales[n + 8]) << 16

the second at group g with a = 0. So words only move, and the 16 bytes at ``128·m + 4·lane`` are
the tensor core's fragment of rows 16·m..16·m + 15 for that lane, low and high nibbles together.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TILE = 64
"""Rows and columns of a block."""

BLOCK = (9, TILE)
"""int32 words of a block: eight rows of weights and one of scales."""

_WEIGHT_ROWS = 8


def unavailable_reason(N: int, K: int) -> str | None:
    """Why weights [N, K] have no such layout; None when they have."""
    if N > 0 and K > 0 and N % TILE == 0 and K % TILE == 0:
        return None
    return f"weights are [{N}, {K}]; the int4 kernel needs N and K to be multiples of {TILE}"


@functools.partial(jax.jit, inline=True)
def pack(words: jax.Array, scales: jax.Array) -> jax.Array:
    """Words int32 [.., N, K/8] and scales float16 [.., N, K/32] -> int32 [.., N/64, K/64, 9, 64].

    Raises:
        ValueError: N or K is not a multiple of 64.
    """
    *lead, N, groups = scales.shape
    reason = unavailable_reason(N, 32 * groups)
    if reason:
        raise ValueError(reason)
    rows, tiles = (*lead, N // TILE, 4, 2, 8), groups // 2
    # [t, m, a, r, p, c, i] -> [t, p, m, r, i, c, a], and the same without i.
    words = _permute(words.reshape(*rows, tiles, 2, 4), (0, 4, 1, 3, 6, 5, 2))
    halves = lax.bitcast_convert_type(scales, jnp.uint16).reshape(*rows, tiles, 2)
    pairs = lax.bitcast_convert_type(_permute(halves, (0, 4, 1, 3, 5, 2)), jnp.int32)
    shape = (*lead, N // TILE, tiles, -1, TILE)
    return jnp.concatenate([words.reshape(shape), pairs.reshape(shape)], axis=-2)


def pack_into(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    """:func:`pack` on the host, into contiguous ``blocks`` int32 [N/64, K/64, 9, 64]."""
    row_tiles, tiles = blocks.shape[:2]
    rows, split = (row_tiles, 4, 2, 8), _WEIGHT_ROWS * TILE
    flat = blocks.reshape(row_tiles, tiles, -1)
    # The same orders as in pack; halves are those of a word, the first the lower.
    flat[..., :split].reshape(row_tiles, tiles, 4, 8, 4, 2, 2)[...] = np.transpose(
        words.reshape(*rows, tiles, 2, 4), (0, 4, 1, 3, 6, 5, 2)
    )
    flat[..., split:].view("<u2").reshape(row_tiles, tiles, 4, 8, 2, 2)[...] = np.transpose(
        scales.view(np.uint16).reshape(*rows, tiles, 2), (0, 4, 1, 3, 5, 2)
    )


@functools.partial(jax.jit, inline=True)
def unpack(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inverse of :func:`pack`: words int32 [.., N, K/8] and scales float16 [.., N, K/32]."""
    *lead, row_tiles, tiles, _, _ = blocks.shape
    N, shape = row_tiles * TILE, (*lead, row_tiles, tiles, 4, 8)
    words = blocks[..., :_WEIGHT_ROWS, :].reshape(*shape, 4, 2, 2)
    pairs = blocks[..., _WEIGHT_ROWS:, :].reshape(*shape, 2)
    halves = lax.bitcast_convert_type(pairs, jnp.uint16)
    # [t, p, m, r, i, c, a] -> [t, m, a, r, p, c, i], and the same without i.
    words = _permute(words, (0, 2, 6, 3, 1, 5, 4)).reshape(*lead, N, 8 * tiles)
    halves = _permute(halves, (0, 2, 5, 3, 1, 4)).reshape(*lead, N, 2 * tiles)
    return words, lax.bitcast_convert_type(halves, jnp.float16)


def _permute(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Permute the last axes, leaving leading ones."""
    lead = x.ndim - len(axes)
    return jnp.transpose(x, (*range(lead), *(lead + axis for axis in axes)))
