"""A weight that lies in a file, and its one conversion on the way to the device."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.checks import check_finite
from gdn_jax.errors import CheckpointError, QuantizationError
from gdn_jax.quant.q4array import Q4Array
from gdn_jax.quant.quantize import quantize_q4
from gdn_jax.types import Array

PIECE = 2**25
"""Numbers that are read and converted at once."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight of a file: ``rows(a, b)`` has its rows a to b in float32, bfloat16 or float16.

    ``int4(a, b)``, where the file holds int4 blocks, has the same rows with the file's own bits.
    ``nbytes`` are read from the file for it.
    """

    where: str
    name: str
    nbytes: int
    rows: Callable[[int, int], np.ndarray]
    int4: Callable[[int, int], Q4Array] | None = None


def to_device(stored: Stored, shape: tuple[int, ...], held: str) -> Array | Q4Array:
    """The weight on the default device as f32, bf16 (rounded to nearest even) or q4, complete.

    On the host there is one piece of rows at a time, and of f32 and bf16 the result.

    Raises:
        CheckpointError: a value that is not finite.
        QuantizationError: a scale beyond float16.
    """
    if held == "q4":
        parts = [_int4(stored, a, b) for a, b in _pieces(shape)]
        whole = parts[0] if len(parts) == 1 else jax.tree.map(_joined, *parts)
        return jax.block_until_ready(whole)
    out = np.empty(shape, {"f32": np.float32, "bf16": jnp.bfloat16}[held])
    for a, b in _pieces(shape):
        x = stored.rows(a, b)
        check_finite(stored.where, f"tensor {stored.name}", x, CheckpointError, first_row=a)
        out[a:b] = x
    # Not jnp.asarray, which holds two more copies on the host while it runs.
    return jax.block_until_ready(jax.device_put(out))


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows = max(1, PIECE // int(np.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])


def _joined(*parts: Array) -> Array:
    return jnp.concatenate(parts)


def _int4(stored: Stored, a: int, b: int) -> Q4Array:
    if stored.int4 is not None:
        return stored.int4(a, b)
    try:
        return quantize_q4(stored.rows(a, b))
    except QuantizationError as error:
        rows = f", rows from {a}" if a else ""
        raise QuantizationError(f"{stored.where}: tensor {stored.name}{rows}: {error}") from None
