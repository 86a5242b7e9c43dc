"""Distances between a result and its reference. NaN or infinity is infinitely far."""

import dataclasses

import numpy as np

from gdn_jax.errors import ShapeError


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far ``out`` is from ``ref``.

    ``max_rel = max|out - ref| / max|ref|`` and ``rms_rel = ‖out - ref‖₂ / ‖ref‖₂``; both are
    infinite when anything is not finite, and zero against an all-zero reference only when equal.
    """

    max_abs_err: float
    max_abs_ref: float
    rms_rel: float

    @property
    def max_rel(self) -> float:
        """``max_abs_err / max_abs_ref``."""
        return _ratio(self.max_abs_err, self.max_abs_ref)


def distance(out: np.ndarray, ref: np.ndarray) -> Distance:
    """The distance of two arrays of one shape, computed in float64.

    Raises:
        ShapeError: the shapes differ or the arrays are empty.
    """
    out, ref = np.asarray(out), np.asarray(ref)
    if out.shape != ref.shape or not out.size:
        raise ShapeError(
            f"distance: out has shape {out.shape}, ref {ref.shape}; needed equal, not empty"
        )
    out, ref = out.astype(np.float64), ref.astype(np.float64)
    if not (np.isfinite(out).all() and np.isfinite(ref).all()):
        return Distance(np.inf, float(np.max(np.abs(ref))), np.inf)
    err = out - ref
    return Distance(
        float(np.max(np.abs(err))),
        float(np.max(np.abs(ref))),
        _ratio(float(np.linalg.norm(err)), float(np.linalg.norm(ref))),
    )


def worst_head(out: np.ndarray, ref: np.ndarray) -> tuple[int, float]:
    """The index along the first axis whose own max_rel is worst, and that value.

    Each head is normalised by itself: one global norm can hide one bad head.
    """
    values = [distance(o, r).max_rel for o, r in zip(out, ref, strict=True)]
    worst = int(np.argmax(values))
    return worst, values[worst]


def unequal(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements differ in any bit; NaNs of equal bits are equal, 0 and -0 are not.

    Raises:
        ShapeError: the shapes or dtypes differ.
    """
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ShapeError(f"unequal: {a.dtype}{a.shape} and {b.dtype}{b.shape}; needed the same")
    words = np.dtype(f"u{a.dtype.itemsize}")
    return int(np.count_nonzero(a.view(words) != b.view(words)))


def _ratio(err: float, ref: float) -> float:
    if err == 0.0:
        return 0.0
    return err / ref if 0.0 < ref < np.inf else np.inf
