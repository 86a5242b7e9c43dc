"""The int4 kernel in NumPy: the index equations and the arithmetic of its warps."""

import numpy as np

import gdn_jax as gdn
from pallas_kernels import q4_layout

LANE = np.arange(32)
ROW, QUAD = LANE // 4, LANE % 4
FOUR = np.arange(4)


def balanced_digits(x: np.ndarray) -> tuple[np.ndarray, int]:
    """A row's digits [.., 4] and its exponent e, as the kernel takes them from the bits."""
    e = max(int(np.abs(x).max().view(np.int32) >> 23) - 126, -90)
    scaled = np.rint(x * np.float32(2.0 ** (30 - e))).astype(np.int64) + 0x00808080
    digits = scaled.astype(np.int32)[..., None].view(np.int8).copy()
    digits[..., :3] ^= np.int8(-128)
    return digits, e


def mma(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """m16n8k32 on fragments as PTX lays them out: a [32, 4, 4], b [32, 2, 4] -> sums [32, 4]."""
    left, right = np.zeros((16, 32), np.int32), np.zeros((32, 8), np.int32)
    for j in range(4):
        left[(ROW + 8 * (j % 2))[:, None], (4 * QUAD + 16 * (j // 2))[:, None] + FOUR] = a[:, j]
    for j in range(2):
        right[(4 * QUAD + 16 * j)[:, None] + FOUR, ROW[:, None]] = b[:, j]
    j = np.arange(4)
    return (left @ right)[ROW[:, None] + 8 * (j // 2), 2 * QUAD[:, None] + j % 2]


def digit_fragments(digits: list[np.ndarray]) -> np.ndarray:
    """What a CTA keeps in shared memory for one or two rows: int8 [steps, 32, 4, 4]."""
    steps = len(digits[0]) // 64
    out = np.zeros((steps, 32, 4, 4), np.int8)
    for row, values in enumerate(digits):
        for p, c, h, i, d in np.ndindex(steps, 2, 2, 4, 4):
            k = 64 * p + 32 * c + 16 * h + 4 * i
            lane = 4 * (4 * (c if len(digits) == 1 else row) + d) + i
            word = 2 * h + c if len(digits) == 1 else 2 * c + h
            out[p, lane, word] = values[k : k + 4, d]
    return out


def emulate_slice(x: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """One or two rows [1 or 2, 64·steps] by 64 rows of weights [steps, 9, 64], warp by warp."""
    digits, exponents = zip(*(balanced_digits(row) for row in x), strict=True)
    fragments, y = digit_fragments(list(digits)), np.zeros((len(x), 64), np.float32)
    row = QUAD // 2 if len(x) == 2 else 0 * QUAD
    factor = 2.0 ** (16 * (QUAD % 2) + np.array(exponents)[row] - 34)
    for m in range(4):
        acc = np.zeros((32, 2), np.float32)
        for block, fragment in zip(blocks.reshape(-1, 576), fragments, strict=True):
            words = block[128 * m : 128 * (m + 1)].view(np.uint8).reshape(32, 4, 4)
            low, high = (words << 4).view(np.int8), (words & 0xF0).view(np.int8)
            pairs = block[512 + 16 * m : 528 + 16 * m].view(np.float16).reshape(8, 2, 2)
            scale = pairs[ROW].astype(np.float32)  # [lane, c, half]
            if len(x) == 1:
                total = mma(low, fragment[:, :2]) + mma(high, fragment[:, 2:])
                sums = [(total, scale[LANE, QUAD // 2])]
            else:
                sums = [
                    (mma(np.concatenate([low[:, n], high[:, n]], 1), fragment[:, n]), scale[:, c])
                    for c, n in enumerate((slice(0, 2), slice(2, 4)))
                ]
            for total, s in sums:
                both = total[:, ::2] + 256 * total[:, 1::2]
                fused = both.astype(np.float32) * s.astype(np.float64) + acc
                acc = fused.astype(np.float32)
        terms = (acc * factor[:, None]).astype(np.float32)
        np.add.at(y, (row[:, None], 16 * m + ROW[:, None] + np.array([0, 8])), terms)
    return y


def emulate(x: np.ndarray, w: gdn.Q4Array, splits: int) -> np.ndarray:
    """The kernel's partial sums, float32 [splits, B, N], for B of one or even."""
    blocks = np.asarray(q4_layout.pack(w.packed, w.scales))
    together = min(len(x), 2)
    parts = np.zeros((splits, len(x), w.shape[0]), np.float32)
    slices = np.split(x, splits, axis=1), np.split(blocks, splits, axis=1)
    for s, (columns, tiles) in enumerate(zip(*slices, strict=True)):
        for r in range(0, len(x), together):
            for t, tile in enumerate(tiles):
                at = s, slice(r, r + together), slice(64 * t, 64 * t + 64)
                parts[at] = emulate_slice(columns[r : r + together], tile)
    return parts
