"""The tensors of a Hugging Face directory: where each one lies, and its checked values."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from gdn_jax._core.checks import check_finite
from gdn_jax.config import read_hf
from gdn_jax.errors import CheckpointError, ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype("<f2")}
STORED = tuple(_DTYPES)
"""Types that are read, as safetensors names them."""


@dataclasses.dataclass(frozen=True)
class Header:
    """Where a tensor lies, its type as safetensors names it, its shape, and its first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of the data, for the types of :data:`STORED`."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def rows(self, first: int, last: int) -> np.ndarray:
        """Rows as they are stored: memory mapped to the file, which is read when they are used.

        safetensors would copy them, at a third of a gigabyte a second.
        """
        dtype, shape = _DTYPES[self.dtype], (last - first, *self.shape[1:])
        begin = self.begin + first * math.prod(self.shape[1:]) * dtype.itemsize
        return np.memmap(self.path, dtype, "r", begin, shape).view(np.ndarray)


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """``places`` has the file of every tensor, by name; ``source`` is the file that says so."""

    source: Path
    places: dict[str, Path]

    @classmethod
    def open(cls, path: Path) -> Self:
        """List the tensors of ``model.safetensors``, or of its index when the model is sharded.

        Raises:
            CheckpointError: neither file exists, or the one that does cannot be read.
        """
        single, index = path / SINGLE, path / INDEX
        if single.exists():
            with _opened(single) as file:
                return cls(single, dict.fromkeys(file.keys(), single))
        if not index.exists():
            raise CheckpointError(f"{path}: no weights; needed {SINGLE} or {INDEX}")
        try:
            names = read_hf(index)[0].get("weight_map")
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
            raise CheckpointError(f"{index}: no weight_map; needed file names by tensor name")
        return cls(index, {name: path / file for name, file in names.items()})

    def headers(self) -> dict[str, Header]:
        """The header of every tensor in the files, no data.

        Raises:
            CheckpointError: files are missing, all of which the message names, or one is truncated.
        """
        paths = sorted(set(self.places.values()))
        absent = [path.name for path in paths if not path.exists()]
        if absent:
            raise CheckpointError(
                f"{self.source}: {len(absent)} of {len(paths)} files missing: {', '.join(absent)}"
            )
        found = {}
        for path in paths:
            with _opened(path) as file:
                begins = _begins(path)
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    shape = tuple(part.get_shape())
                    found[name] = Header(path, part.get_dtype(), shape, begins[name])
        return found

    def read(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = STORED) -> np.ndarray:
        """One tensor in the dtype it is stored in; the header is checked before the data is read.

        Raises:
            CheckpointError: the file is missing, truncated or lacks the tensor, or the tensor has
                another shape, is of none of these ``dtypes``, or is not finite.
        """
        path = self.places[name]
        with _opened(path, f"; needed for tensor {name}") as file:
            if name not in file.keys():  # noqa: SIM118
                raise CheckpointError(f"{path}: no tensor {name}, which {self.source} places there")
            header = file.get_slice(name)
            dtype, found = header.get_dtype(), tuple(header.get_shape())
            if dtype not in dtypes:
                needed = " or ".join(dtypes)
                raise CheckpointError(f"{path}: tensor {name} is {dtype}; needed {needed}")
            if found != shape:
                raise CheckpointError(
                    f"{path}: tensor {name} has shape {list(found)}; needed {list(shape)}"
                )
            x = file.get_tensor(name)
        check_finite(str(path), name, x, CheckpointError)
        return x

    def read_as(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """One tensor in ``dtype``, every value unchanged.

        Raises:
            CheckpointError: as :meth:`read`, or ``dtype`` would round a value.
        """
        return self.exactly(name, self.read(name, shape), dtype)

    def exactly(self, name: str, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The values ``x`` of a tensor in ``dtype``.

        Raises:
            CheckpointError: ``dtype`` would round a value.
        """
        with np.errstate(over="ignore", under="ignore"):
            y = x.astype(dtype, copy=False)
        if np.can_cast(x.dtype, dtype):
            return y
        rounded = np.count_nonzero(y.astype(np.float32) != x.astype(np.float32))
        if rounded:
            raise CheckpointError(
                f"{self.places[name]}: tensor {name} is {x.dtype}, and {dtype} would round "
                f"{rounded} of its {x.size} values; needed dtype float32"
            )
        return y


def _begins(path: Path) -> dict[str, int]:
    """The first byte of every tensor of a file that safetensors has accepted."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: 8 + size + part["data_offsets"][0] for name, part in header.items()}


def _opened(path: Path, purpose: str = "") -> Any:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file{purpose}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: truncated or not a safetensors file{purpose} ({error})"
        ) from None
