"""Tile sizes. Every number that a measurement may change is here."""

from typing import NamedTuple

MAX_TOKENS = 4096
"""Tokens of one launch. A CTA takes them one after another: a longer run is a chunked kernel's."""

HEAD_DIMS = (64, 128)
"""Widths K and V that the kernels are written for."""

CONV_WIDTHS = (2, 3, 4)
"""Taps of the convolution that the kernels are written for."""

CHANNELS = 64
"""Channels of the convolution come in multiples of it."""

CHUNK = 64
"""Tokens of a chunk of the delta rule."""

TILES = (32, 64, 128)
"""Columns of S that a CTA may own."""


def delta_rule_tile(rows: int, V: int) -> int:
    """Columns of S a CTA of the delta rule owns, for a batch of ``rows``."""
    return min(32 if rows < 4 else 64, V)


def middle_tile(rows: int, V: int, clusters: bool) -> int:
    """Columns of S a CTA of the middle kernel owns, for a batch of ``rows``."""
    return min(64 if clusters and rows < 8 else V, V)


def float_gemv_tiling(batch: int, size: int) -> tuple[int, int, int]:
    """For ``batch`` rows of x a CTA and weights of ``size`` bytes: rows of weights a warp owns,
    most vectors of a row that a lane requests at once, bytes of a vector.
    """
    if batch == 1:
        return (1, 8, 16) if size == 4 else (2, 2, 16)
    if batch == 2:
        return (2, 4, 16) if size == 4 else (2, 2, 16)
    return (4, 1, 16)


def gate_slices(K: int) -> tuple[int, int]:
    """K slices, and rows of x a CTA takes, of the rows b and a beside the large projections: short
    work, since while it lasts there are fewer CTAs for the rest.
    """
    return next(n for n in (10, 8, 4, 2, 1) if K % (32 * n) == 0), 2


def chunk_stages(parts: int) -> int:
    """Chunks of the delta rule in shared memory at a time, for values of ``parts`` parts."""
    return 3 if parts == 1 else 1


def norm_ctas(pieces: int) -> int:
    """CTAs that share a row of ``pieces`` · 128 columns whose norm is taken."""
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
    """
    return _largest_divisor(rows, 9)


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if n % d == 0)
