"""The states in slots of a pool, copied out to the host and, after checks, back in."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import Dims, check_array, check_finite
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError
from gdn_jax.layer.state import GDNState
from gdn_jax.serving.device import read_slot
from gdn_jax.serving.prefix import PrefixState


def read_out(state: GDNState, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Host copies of slots ``ids`` int32 [n]: S [L, n, HV, K, V], conv_hist [L, n, W-1, C].

    Slots are read one at a time, so that the device never holds a second pool.
    """
    arrays = {}
    for name, x in vars(state).items():
        arrays[name] = np.empty((x.shape[0], ids.size, *x.shape[2:]), np.float32)
    for i, slot in enumerate(ids):
        for name, part in vars(read_slot(state, slot)).items():
            arrays[name][:, i] = part
    return arrays


def check_host(
    where: str, arrays: Mapping[str, np.ndarray], cfg: GDNConfig, num_layers: int, n: int
) -> None:
    """Raise ShapeError unless both arrays of n slots are given, fit, and are float32 and finite."""
    for name, dims in state_dims(cfg, ("L", num_layers), ("n", n)).items():
        if name not in arrays:
            found = ", ".join(sorted(arrays)) or "nothing"
            raise ShapeError(f"{where}: no {name}; found {found}; needed S and conv_hist")
        check_array(where, name, arrays[name], dims, [jnp.float32])
        check_finite(where, name, np.asarray(arrays[name]), ShapeError)


def check_prefix(where: str, prefix: Any, cfg: GDNConfig, num_layers: int) -> None:
    """Raise ShapeError unless ``prefix`` is a PrefixState of this configuration and depth."""
    if not isinstance(prefix, PrefixState):
        found = type(prefix).__name__
        raise ShapeError(f"{where}: checkpoint is a {found}; needed gdn_jax.PrefixState")
    if prefix.cfg != cfg:
        raise ShapeError(f"{where}: checkpoint is of {prefix.cfg}; needed {cfg}")
    for name, dims in state_dims(cfg, ("L", num_layers)).items():
        check_array(where, f"checkpoint.{name}", getattr(prefix, name), dims, [jnp.float32])


def state_dims(cfg: GDNConfig, *lead: tuple[str, int | None]) -> dict[str, Dims]:
    """Names and sizes of the axes of S and conv_hist, after those of ``lead``."""
    S = (("HV", cfg.num_v_heads), ("K", cfg.head_k_dim), ("V", cfg.head_v_dim))
    hist = (("W-1", cfg.conv_width - 1), ("C", cfg.conv_dim))
    return {"S": [*lead, *S], "conv_hist": [*lead, *hist]}


def parts(arrays: Mapping[str, np.ndarray]) -> Iterator[GDNState]:
    """What each slot of :func:`read_out` holds, on the device: S [L, HV, K, V], conv_hist."""
    for i in range(arrays["S"].shape[1]):
        yield GDNState(*(jnp.asarray(arrays[name][:, i]) for name in ("S", "conv_hist")))
