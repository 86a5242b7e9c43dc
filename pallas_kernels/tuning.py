"""Tile sizes. Every number that a measurement may change is here."""

from typing import NamedTuple

MAX_TOKENS = 4096
"""Tokens of one launch. A CTA takes them one after another: a longer run is a chunked kernel's."""

HEAD_DIMS = (64, 128)
"""Widths K and V that the kernels are written for."""

CONV_WIDTHS = (2, 3, 4)
"""Taps of the convolution that the middle kernel is written for."""

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


Q4_DIGITS = 1 << 16
"""Bytes of shared memory for the digits of x: 256 for a row of x and 64 columns."""


_Q4_PARTS = ((1, (8, 1, 8, 1)), (2, (8, 4, 4, 1)), (4, (8, 4, 2, 2)), (None, (10, 4, 2, 2)))
"""Up to so many rows of x: the longest slice in steps, the tiles, the longest chunk, ``ahead``."""

_Q4_CLUSTER = ((1, (2, 4)), (2, (3, 2)), (4, (2, 2)), (None, (2, 1)))
"""Up to so many rows of x: the longest chunk, ``ahead``."""


def q4_plan(B: int, steps: int) -> Q4Plan:
    """For B rows of x and weights of ``steps`` · 64 columns, partial sums as the result."""
    longest, tiles, chunk, ahead = _row_of(_Q4_PARTS, B)
    mine = _largest_divisor(steps, longest)
    return Q4Plan(16, steps // mine, tiles, _largest_divisor(mine, chunk), ahead)


def q4_cluster_plan(B: int, steps: int) -> Q4Plan | None:
    """The same with the K slices in one cluster; None where they are too long for it."""
    splits = _largest_divisor(steps, 8)
    mine = steps // splits
    rows = min(16, Q4_DIGITS // (512 * mine) * 2)
    chunk, ahead = _row_of(_Q4_CLUSTER, B)
    return Q4Plan(rows, splits, 1, _largest_divisor(mine, chunk), ahead) if rows else None


def _row_of(table: tuple[tuple[int | None, tuple[int, ...]], ...], B: int) -> tuple[int, ...]:
    return next(row for most, row in table if most is None or most >= B)


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if n % d == 0)
