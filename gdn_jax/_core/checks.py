"""Checks shapes and dtypes with chex, and words the error for the person who made the call."""

from collections.abc import Sequence
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np

from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError

Dims = Sequence[tuple[str, int | None]]
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_array(where: str, name: str, x: Any, dims: Dims, dtypes: Sequence[Any]) -> None:
    """Raise ShapeError unless ``x`` has these sizes (None: any) and one of these dtypes."""
    needed = ", ".join(n if size is None else f"{n}={size}" for n, size in dims)
    wanted = f"[{needed}] {' or '.join(jnp.dtype(d).name for d in dtypes)}"
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ShapeError(f"{where}: {name} is a {type(x).__name__}; needed an array {wanted}")
    try:
        chex.assert_shape(x, tuple(size for _, size in dims))
        if jnp.dtype(x.dtype) not in [jnp.dtype(d) for d in dtypes]:
            chex.assert_type(x, dtypes[0])
    except (AssertionError, ValueError, TypeError):
        found = f"shape {tuple(x.shape)} and dtype {x.dtype}"
        raise ShapeError(f"{where}: {name} has {found}; needed {wanted}") from None


def check_config(where: str, cfg: Any) -> None:
    """Raise ShapeError unless ``cfg`` is a GDNConfig."""
    if not isinstance(cfg, GDNConfig):
        raise ShapeError(f"{where}: cfg is a {type(cfg).__name__}; needed a gdn_jax.GDNConfig")


def check_finite(
    where: str, name: str, x: np.ndarray, error: type[Exception], *, first_row: int = 0
) -> None:
    """Raise ``error`` when a host array holds NaN or infinity, naming the first place.

    ``first_row`` is the row of the whole tensor at which ``x`` begins.
    """
    bad = ~np.isfinite(x)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        named = [place[0] + first_row, *place[1:]]
        raise error(f"{where}: {name}{named} is {x[place]}; needed finite numbers")
