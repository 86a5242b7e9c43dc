"""Tile sizes. Every number that a measurement may change is here.

A function says on which device its numbers were chosen and by which versions: rows of
docs/results/ladder.json, each as its kernel, a colon, and the version. What no recorded row chose
is said to be so. Numbers for another device go beside these, with rows of their own.
"""

from typing import NamedTuple

MAX_TOKENS = 4096
"""Tokens of one launch. A CTA takes them one after another: a longer run is a chunked kernel's.
Not measured.
"""

HEAD_DIMS = (64, 128)
"""Widths K and V that the kernels are written for."""

CONV_WIDTHS = (2, 3, 4)
"""Taps of the convolution that the kernels are written for."""

CHANNELS = 64
"""Channels of the convolution come in multiples of it."""

CHUNK = 64
"""Tokens of a chunk of the delta rule: the rows of a warpgroup's product."""

CONV_TOKENS = 16
"""Tokens that a CTA of the convolution takes, after the W-1 before them. Not measured."""


def delta_rule_tile(rows: int, V: int) -> int:
    """Columns of S a CTA of the delta rule owns, for a batch of ``rows``.

    Chosen on NVIDIA H200 by
        - delta rule, one token, 48 heads of 128×128: sums inside warps, operands fetched before
          the wait
    Not measured: from which batch between 1 and 8 on 64 columns are faster.
    """
    return min(32 if rows < 4 else 64, V)


def middle_tile(rows: int, V: int, clusters: bool) -> int:
    """Columns of S a CTA of the middle kernel owns, for a batch of ``rows``.

    Chosen on NVIDIA H200 by
        - middle kernel, one token, 48 heads of 128×128, 8 partial sums: the same, one channel a
          thread for q, k, v and z
    Not measured: whole heads from 8 rows on.
    """
    return min(64 if clusters and rows < 8 else V, V)


def float_gemv_tiling(batch: int, size: int) -> tuple[int, int, int]:
    """For ``batch`` rows of x a CTA and weights of ``size`` bytes: rows of weights a warp owns,
    most vectors of a row that a lane requests at once, bytes of a vector.

    Chosen on NVIDIA H200 by
        - float32 product 16384×5120, one row: 1 row a warp
        - bfloat16 product 16384×5120, one row: 2 rows a warp
        - float32 product 16384×5120, eight rows: 4 rows of weights a warp, 8 rows of x a CTA
        - bfloat16 product 16384×5120, eight rows: 4 rows of weights a warp, 8 rows of x a CTA
    Not measured: two rows of x, the vectors requested at once, and their bytes.
    """
    if batch == 1:
        return (1, 8, 16) if size == 4 else (2, 2, 16)
    if batch == 2:
        return (2, 4, 16) if size == 4 else (2, 2, 16)
    return (4, 1, 16)


def gate_slices(K: int) -> tuple[int, int]:
    """K slices, and rows of x a CTA takes, of the rows b and a beside the large projections: short
    work, since while it lasts there are fewer CTAs for the rest.

    Chosen on NVIDIA H200 by
        - int4 product 16384×5120, eight rows: rows b and a in shorter CTAs, two rows of x each,
          512 channels of history a CTA
    """
    return next(n for n in (10, 8, 4, 2, 1) if K % (32 * n) == 0), 2


def history_pieces(C: int, width: int) -> int:
    """Pieces of ``width`` channels, 64 or 128, that a CTA of the history takes, of C channels.

    Chosen on NVIDIA H200 by
        - int4 product 16384×5120, eight rows: rows b and a in shorter CTAs, two rows of x each,
          512 channels of history a CTA
    """
    return next(n for n in (4, 2, 1) if C % (n * width) == 0)


def chunk_stages(parts: int) -> int:
    """Chunks of the delta rule in shared memory at a time, for values of ``parts`` parts.

    Chosen on NVIDIA H200 by
        - chunked delta rule, 16384 tokens, 16 and 48 heads of 128, bfloat16: k·kᵀ and q·kᵀ anew
          for each head, 3 stages, products issued together
        - chunked delta rule, 16384 tokens, 16 and 48 heads of 128, bfloat16: float32 as three
          bfloat16, one stage
    """
    return 3 if parts == 1 else 1


def norm_ctas(pieces: int) -> int:
    """CTAs that share a row of ``pieces`` · 128 columns whose norm is taken.

    Chosen on NVIDIA H200 by
        - end of a block and norm of the next, 27B, B = 1: one kernel, a cluster of eight CTAs a
          row
    Not measured: fewer, which are for rows that eight cannot share evenly.
    """
    return next(n for n in (8, 4, 2, 1) if pieces % n == 0)


class Q4Plan(NamedTuple):
    """How the int4 kernel divides its work: a CTA takes ``rows`` of x, ``tiles`` · 64 rows of
    weights and one of ``splits`` K slices. It requests ``chunk`` · 64 columns of weights at once,
    ``ahead`` times before it multiplies the first of them.
    """

    rows: int
    splits: int
    tiles: int
    chunk: int
    ahead: int


def q4_plan(B: int, row_tiles: int, steps: int) -> Q4Plan:
    """For B rows of x and weights of ``row_tiles`` · 64 rows and ``steps`` · 64 columns.

    A slice is one chunk if that leaves at most 16 of them, for the partial sums of many slices
    cost as much as what they save. Several row tiles a CTA share the digits of x.

    Chosen on NVIDIA H200 by
        - int4 product 16384×5120, one row: 10 splits of K
        - int4 product 16384×5120, eight rows: slices of one chunk, 8 row tiles a CTA: plan
          (8, 16, 8, 5, 1)
        - int4 product 16384×5120, eight rows: 8 or 10 K slices instead of 16
    Not measured: two rows of x, and 2 row tiles a CTA for matrices of fewer than 96.
    """
    if B <= 2:
        mine = _largest_divisor(steps, 8)
        chunk = mine if B == 1 else _largest_divisor(mine, 4)
        return Q4Plan(2, steps // mine, 1 if B == 1 else 4, chunk, 1)
    chunk = _largest_divisor(steps, 5)
    mine = chunk if steps // chunk <= 16 else _largest_divisor(steps, 8)
    return Q4Plan(8, steps // mine, 8 if row_tiles >= 96 else 2, _largest_divisor(mine, chunk), 1)


def stream_rows(rows: int) -> int:
    """Rows of 2048 bytes that a CTA of the streaming kernel requests at once: as many bytes, 18 KB,
    as the int4 kernel for one row of x.

    Not measured: it has to be what the int4 kernel has.
    """
    return _largest_divisor(rows, 9)


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if n % d == 0)
