"""Arrays in a safetensors file that carries its format, version, configuration and a checksum."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping

import numpy as np

from gdn_jax._core.files import write_atomically
from gdn_jax.config import GDNConfig
from gdn_jax.errors import GDNError, StateFileError


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file: its ``format`` and ``version``, its tensors, and the words for messages."""

    format: str
    version: int
    names: frozenset[str]
    called: str
    writer: str


def write_sealed(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], kind: Kind, cfg: GDNConfig
) -> None:
    """Write the file whole or not at all."""
    from safetensors.numpy import save

    metadata = {
        "format": kind.format,
        "version": str(kind.version),
        "config": json.dumps(dataclasses.asdict(cfg)),
        "sha256": digest(arrays),
    }
    write_atomically(path, save(dict(arrays), metadata))


def read_sealed(path: str | os.PathLike[str], kind: Kind, cfg: GDNConfig) -> dict[str, np.ndarray]:
    """The arrays of a file of this kind, bit for bit; their shapes are the caller's to check.

    Raises:
        StateFileError: the file is missing, truncated or of another kind or version, was written
            for another configuration, or fails its checksum.
    """
    metadata, arrays = read_tensors(path, StateFileError)
    if metadata.get("format") != kind.format or set(arrays) != kind.names:
        raise StateFileError(f"{path}: not a {kind.called}; needed one written by {kind.writer}")
    if metadata.get("version") != str(kind.version):
        found = metadata.get("version")
        raise StateFileError(f"{path}: format version {found}; needed {kind.version}")
    if metadata.get("sha256") != digest(arrays):
        raise StateFileError(f"{path}: altered since it was written (checksum differs)")
    written_for, needed = metadata.get("config"), json.dumps(dataclasses.asdict(cfg))
    if written_for != needed:
        raise StateFileError(f"{path}: written for {written_for}; needed {needed}")
    return arrays


def read_tensors(
    path: str | os.PathLike[str], error: type[GDNError]
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and arrays of a safetensors file.

    Raises:
        error: the file is missing, truncated or not safetensors, or has a dtype that NumPy lacks.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, arrays
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except (SafetensorError, OSError, AttributeError) as cause:
        raise error(f"{path}: truncated or not a safetensors file ({cause})") from None


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, dtypes, shapes and data."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
        found.update(np.ascontiguousarray(arrays[name]).data)
    return found.hexdigest()
