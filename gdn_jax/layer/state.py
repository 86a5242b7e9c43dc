"""The state of a layer: explicit, functional, and storable."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import check_array, check_config, check_finite
from gdn_jax._core.sealed import Kind, read_sealed, write_sealed
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError, StateFileError
from gdn_jax.types import Array

_NAMES = frozenset({"S", "conv_hist"})
_KIND = Kind("gdn-jax-state", 1, _NAMES, "state file", "gdn_jax.save_state")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GDNState:
    """Recurrent state ``S`` float32 [.., HV, K, V] and ``conv_hist`` float32 [.., W-1, C].

    The leading axes are [B] for one layer and [L, B] for a stack. The history is oldest frame
    first and holds the convolution's inputs. A new sequence starts from zeros.
    """

    S: Array
    conv_hist: Array

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.S.nbytes + self.conv_hist.nbytes


def init_state(cfg: GDNConfig, batch: int = 1) -> GDNState:
    """Zeros for ``batch`` new sequences: S [B, HV, K, V], conv_hist [B, W-1, C], float32.

    Raises:
        ShapeError: ``batch`` is not a positive integer, or ``cfg`` is not a GDNConfig.
    """
    return zeros("init_state", cfg, (batch,))


def zeros(where: str, cfg: GDNConfig, lead: tuple[int, ...]) -> GDNState:
    """A state of zeros with these leading axes.

    Raises:
        ShapeError: ``cfg`` is not a GDNConfig, or a size is not a positive integer.
    """
    check_config(where, cfg)
    for size in lead:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ShapeError(f"{where}: batch is {size!r}; needed a positive integer")
    S = (cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim)
    hist = (cfg.conv_width - 1, cfg.conv_dim)
    return GDNState(jnp.zeros((*lead, *S), jnp.float32), jnp.zeros((*lead, *hist), jnp.float32))


def check_state(
    where: str, state: Any, cfg: GDNConfig, batch: int | None = None, layers: int | None = None
) -> None:
    """Raise ShapeError unless ``state`` fits ``cfg``, as a stack when ``layers`` is given."""
    check_config(where, cfg)
    if not isinstance(state, GDNState):
        raise ShapeError(f"{where}: state is a {type(state).__name__}; needed gdn_jax.GDNState")
    lead: list[tuple[str, int | None]] = [] if layers is None else [("L", layers)]
    S = (("HV", cfg.num_v_heads), ("K", cfg.head_k_dim), ("V", cfg.head_v_dim))
    hist = (("W-1", cfg.conv_width - 1), ("C", cfg.conv_dim))
    check_array(where, "state.S", state.S, [*lead, ("B", batch), *S], [jnp.float32])
    rows = state.S.shape[len(lead)]
    check_array(
        where, "state.conv_hist", state.conv_hist, [*lead, ("B", rows), *hist], [jnp.float32]
    )


def reset_state(state: GDNState) -> GDNState:
    """Zeros of the same shapes, whatever the state held, NaN included."""
    return jax.tree.map(jnp.zeros_like, state)


def clone_state(state: GDNState) -> GDNState:
    """A copy with buffers of its own, so that donating one leaves the other usable."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def export_state(state: GDNState) -> dict[str, np.ndarray]:
    """Host copies of both arrays under their field names; :func:`import_state` takes them back."""
    return {"S": np.array(state.S), "conv_hist": np.array(state.conv_hist)}


def import_state(arrays: Mapping[str, np.ndarray], cfg: GDNConfig) -> GDNState:
    """The state of one layer (or, with one more axis, of a stack) from host arrays.

    Raises:
        ShapeError: an array missing, of the wrong shape or dtype, or not finite.
    """
    where = "import_state"
    for name in ("S", "conv_hist"):
        if name not in arrays:
            found = ", ".join(sorted(arrays)) or "nothing"
            raise ShapeError(f"{where}: no {name}; found {found}; needed S and conv_hist")
    host = GDNState(arrays["S"], arrays["conv_hist"])  # pyright: ignore[reportArgumentType]
    layers = arrays["S"].shape[0] if getattr(arrays["S"], "ndim", 0) == 5 else None
    check_state(where, host, cfg, layers=layers)
    for name in ("S", "conv_hist"):
        check_finite(where, name, arrays[name], ShapeError)
    return jax.tree.map(jnp.asarray, host)


def save_state(path: str | os.PathLike[str], state: GDNState, cfg: GDNConfig) -> None:
    """Write a state of one layer or of a stack to a safetensors file, atomically.

    The file carries the configuration and a SHA-256 of the data. It appears under ``path`` whole
    or not at all.

    Raises:
        ShapeError: the state does not fit ``cfg``.
        StateFileError: the state is not finite; nothing is written.
    """
    layers = state.S.shape[0] if getattr(getattr(state, "S", None), "ndim", 0) == 5 else None
    check_state("save_state", state, cfg, layers=layers)
    arrays = export_state(state)
    for name, x in arrays.items():
        check_finite(f"{path}: not written", name, x, StateFileError)
    write_sealed(path, arrays, _KIND, cfg)


def load_state(path: str | os.PathLike[str], cfg: GDNConfig) -> GDNState:
    """Read a state written by :func:`save_state`, bit for bit.

    Raises:
        StateFileError: the file is missing, truncated or not a state file; was written for
            another configuration; fails its checksum; or holds a number that is not finite.
    """
    check_config("load_state", cfg)
    arrays = read_sealed(path, _KIND, cfg)
    for name, x in arrays.items():
        check_finite(str(path), name, x, StateFileError)
    try:
        return import_state(arrays, cfg)
    except ShapeError as error:
        raise StateFileError(f"{path}: {error}") from None
