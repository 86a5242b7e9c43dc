"""Exchange layouts of int4 weights, all on the host and lossless both ways.

Both carry the bits of :class:`Q4Array` unchanged, except that GGUF's nibbles have an offset: a
scale that is -0, subnormal or not finite comes back as it was.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from gdn_jax.errors import ShapeError
from gdn_jax.quant.q4array import GROUP, WORDS, Q4Array, check_q4

BLOCK_BYTES = 18
"""A group in GGUF: the scale, then 16 bytes of nibbles."""

TILE_ROWS, TILE_BYTES = 4, 72
"""A tile: four scales, then 16 bytes for each of its rows."""

_OFFSET = 0x88
"""Adding 8 to both nibbles of a byte, modulo 16, flips their upper bits."""


def q4_to_gguf_blocks(w: Q4Array) -> np.ndarray:
    """GGUF ``Q4_0`` rows: w [N, K] -> uint8 [N, K/32·18].

    A group is its float16 scale, little-endian, then 16 bytes: byte j holds ``integer + 8`` of
    column j in its low half and of column j + 16 in its high half.

    Raises:
        ShapeError: ``w`` is not a Q4Array [N, K].
    """
    scales, nibbles = _to_host("q4_to_gguf_blocks", w)
    return np.concatenate([scales, nibbles ^ _OFFSET], axis=-1).reshape(len(scales), -1)


def q4_from_gguf_blocks(raw: Any, shape: tuple[int, int]) -> Q4Array:
    """The weights [N, K] of GGUF ``Q4_0`` rows: inverse of :func:`q4_to_gguf_blocks`.

    Args:
        raw: uint8 [N, K/32·18], or the same bytes in one axis.
        shape: (N, K), K a multiple of 32.

    Raises:
        ShapeError: a shape that int4 cannot have, another dtype, another number of bytes.
    """
    where = "q4_from_gguf_blocks"
    N, groups = _check_shape(where, shape)
    blocks = _bytes(where, raw, (N, groups * BLOCK_BYTES)).reshape(N, groups, BLOCK_BYTES)
    return on_device(*words_of_gguf_blocks(blocks))


def words_of_gguf_blocks(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fields of a Q4Array, on the host, from groups uint8 [N, K/32, 18]."""
    return _words(blocks[..., :2], blocks[..., 2:] ^ _OFFSET)


def on_device(packed: np.ndarray, scales: np.ndarray) -> Q4Array:
    """The Q4Array on the device, from its fields on the host."""
    return Q4Array(jnp.asarray(packed), jnp.asarray(scales))


def q4_to_tiles(w: Q4Array) -> np.ndarray:
    """Tiles of 4 rows × 32 columns: w [N, K] -> uint8 [N/4, K/32·72].

    A tile is the four rows' float16 scales, little-endian, then 16 bytes a row: byte j holds the
    two's complement nibble of column j in its low half and of column j + 16 in its high half.
    Tiles of the same four rows follow each other in column order. A tile always holds four rows,
    so an N that is not a multiple of 4 is refused.

    Raises:
        ShapeError: ``w`` is not a Q4Array [N, K], or N is not a multiple of 4.
    """
    where = "q4_to_tiles"
    scales, nibbles = _to_host(where, w)
    N, groups = scales.shape[:2]
    _check_tile_rows(where, N)
    parts = [_fold(part, N, groups) for part in (scales, nibbles)]
    return np.concatenate(parts, axis=-1).reshape(N // TILE_ROWS, groups * TILE_BYTES)


def q4_from_tiles(raw: Any, shape: tuple[int, int]) -> Q4Array:
    """The weights [N, K] of tiles: inverse of :func:`q4_to_tiles`.

    Args:
        raw: uint8 [N/4, K/32·72], or the same bytes in one axis.
        shape: (N, K), N a multiple of 4 and K of 32.

    Raises:
        ShapeError: a shape that tiles cannot have, another dtype, another number of bytes.
    """
    where = "q4_from_tiles"
    N, groups = _check_shape(where, shape)
    _check_tile_rows(where, N)
    raw = _bytes(where, raw, (N // TILE_ROWS, groups * TILE_BYTES))
    tiles = raw.reshape(-1, groups, TILE_BYTES)
    split = 2 * TILE_ROWS
    parts = (_unfold(part, N, groups) for part in (tiles[..., :split], tiles[..., split:]))
    return on_device(*_words(*parts))


def _fold(x: np.ndarray, N: int, groups: int) -> np.ndarray:
    """Bytes [N, groups, n] -> [N/4, groups, 4·n], the four rows of a tile one after the other."""
    rows = x.reshape(N // TILE_ROWS, TILE_ROWS, groups, -1)
    return np.swapaxes(rows, 1, 2).reshape(N // TILE_ROWS, groups, -1)


def _unfold(x: np.ndarray, N: int, groups: int) -> np.ndarray:
    rows = x.reshape(N // TILE_ROWS, groups, TILE_ROWS, -1)
    return np.swapaxes(rows, 1, 2).reshape(N, groups, -1)


def _to_host(where: str, w: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scale bytes [N, K/32, 2] and two's complement nibbles [N, K/32, 16], both uint8."""
    check_q4(where, "w", w, [("N", None), ("K", None)])
    scales = np.asarray(w.scales).astype("<f2")[..., None].view(np.uint8)
    words = np.asarray(w.packed).astype("<i4").view(np.uint8)
    return scales, words.reshape(*scales.shape[:2], -1)


def _words(scales: np.ndarray, nibbles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Words and scales from the bytes that :func:`_to_host` gives."""
    N, groups = scales.shape[:2]
    halves = np.ascontiguousarray(scales).view("<f2")[..., 0].astype(np.float16)
    words = np.ascontiguousarray(nibbles).view("<i4").astype(np.int32)
    return words.reshape(N, WORDS * groups), halves


def _check_shape(where: str, shape: Any) -> tuple[int, int]:
    """N and K/32 of a shape (N, K)."""
    ok = isinstance(shape, tuple) and len(shape) == 2
    if not ok or not all(isinstance(n, int) and n > 0 for n in shape) or shape[1] % GROUP:
        raise ShapeError(f"{where}: shape is {shape!r}; needed (N, K), K a multiple of {GROUP}")
    return shape[0], shape[1] // GROUP


def _check_tile_rows(where: str, N: int) -> None:
    if N % TILE_ROWS:
        raise ShapeError(f"{where}: N is {N}; needed a multiple of {TILE_ROWS}, the rows of a tile")


def _bytes(where: str, raw: Any, shape: tuple[int, int]) -> np.ndarray:
    """``raw`` as a host array, if it is uint8 of this shape, or as many bytes in one axis."""
    if not hasattr(raw, "shape") or raw.dtype != np.uint8:
        found = f"a {type(raw).__name__}" if not hasattr(raw, "shape") else f"of {raw.dtype}"
        raise ShapeError(f"{where}: raw is {found}; needed uint8 {list(shape)}")
    if raw.shape not in (shape, (shape[0] * shape[1],)):
        found = f"shape {raw.shape}, {raw.size} bytes"
        needed = f"{list(shape)}, {shape[0] * shape[1]} bytes"
        raise ShapeError(f"{where}: raw has {found}; needed {needed}")
    return np.asarray(raw)
