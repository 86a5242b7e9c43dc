"""Tile sizes. Every number that a measurement may change is here."""

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
