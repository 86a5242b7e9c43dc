"""A weight that lies in a file, and its one conversion on the way to the device."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import check_finite
from gdn_jax.errors import CheckpointError, QuantizationError
from gdn_jax.models import kernels
from gdn_jax.quant.kernel_layout import Q4Kernel
from gdn_jax.quant.q4array import GROUP, WORDS, Q4Array
from gdn_jax.quant.quantize import quantized_rows
from gdn_jax.types import Array

NUMBERS_AT_ONCE = 2**20
"""How many numbers of a weight a thread reads and converts at a time."""
THREADS = min(16, os.cpu_count() or 1)

Put = Callable[[int, int], None]
"""Converts rows a to b into their place on the host."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight in a file: ``rows(a, b)`` reads rows a to b - 1 as float32, bfloat16 or float16.

    Where the file holds int4 blocks, ``int4(a, b)`` reads the words and scales of the same rows,
    the file's own bits. Both are called from several threads. ``nbytes`` is how many bytes of the
    file all rows take.
    """

    where: str
    name: str
    nbytes: int
    rows: Callable[[int, int], np.ndarray]
    int4: Callable[[int, int], tuple[np.ndarray, np.ndarray]] | None = None


def to_device(
    stored: Stored, shape: tuple[int, ...], held: str, *, kernel: bool = False
) -> Array | Q4Array | Q4Kernel:
    """The whole weight on the default device as f32, bf16 (rounded to nearest even) or q4.

    The host holds it in its new form, and a piece of rows for each thread. The device holds nothing
    besides, because tensors of many sizes that are allocated and freed in turn leave gaps in its
    memory. int4 is laid out for the kernels if ``kernel``, where the sizes allow it.

    Raises:
        CheckpointError: a value that is not finite.
        QuantizationError: a scale beyond float16.
    """
    if held == "q4" and kernel and kernels.has_layout(shape):
        out, put = _laid_out(stored, shape)
    elif held == "q4":
        out, put = _exchanged(stored, shape)
    else:
        out, put = _floats(stored, shape, held)
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda piece: put(*piece), _pieces(shape)):
            pass
    # jnp.asarray would hold two more copies on the host while it runs.
    return jax.block_until_ready(jax.device_put(out))


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows = max(1, NUMBERS_AT_ONCE // math.prod(shape[1:]))
    if shape[0] % kernels.TILE == 0:
        rows = -(-rows // kernels.TILE) * kernels.TILE
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])


def _floats(stored: Stored, shape: tuple[int, ...], held: str) -> tuple[np.ndarray, Put]:
    out = np.empty(shape, {"f32": np.float32, "bf16": jnp.bfloat16}[held])

    def put(a: int, b: int) -> None:
        x = stored.rows(a, b)
        check_finite(stored.where, f"tensor {stored.name}", x, CheckpointError, first_row=a)
        out[a:b] = x

    return out, put


def _exchanged(stored: Stored, shape: tuple[int, ...]) -> tuple[Any, Put]:
    N, groups = shape[0], shape[1] // GROUP
    packed, scales = np.empty((N, WORDS * groups), np.int32), np.empty((N, groups), np.float16)

    def put(a: int, b: int) -> None:
        packed[a:b], scales[a:b] = _int4(stored, a, b)

    return Q4Array(packed, scales), put  # pyright: ignore[reportArgumentType]


def _laid_out(stored: Stored, shape: tuple[int, ...]) -> tuple[Any, Put]:
    tiles = [n // kernels.TILE for n in shape]
    blocks = np.empty((*tiles, *kernels.BLOCK), np.int32)

    def put(a: int, b: int) -> None:
        part = blocks[a // kernels.TILE : b // kernels.TILE]
        kernels.fill_blocks(part, *_int4(stored, a, b))

    return Q4Kernel(blocks), put  # pyright: ignore[reportArgumentType]


def _int4(stored: Stored, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
    if stored.int4 is not None:
        return stored.int4(a, b)
    try:
        return quantized_rows(stored.rows(a, b), first=a)
    except QuantizationError as error:
        raise QuantizationError(f"{stored.where}: tensor {stored.name}: {error}") from None
