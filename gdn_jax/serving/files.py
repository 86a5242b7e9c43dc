"""Pools of states in files: every slot in use, and the table that says which those are."""

import dataclasses
import os

import numpy as np

from gdn_jax._core.checks import check_array, check_config, check_finite
from gdn_jax._core.sealed import Kind, read_sealed, write_sealed
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError, StateFileError
from gdn_jax.serving.pool import StatePool, check_pool
from gdn_jax.serving.table import SlotTable

_NAMES = frozenset({"S", "conv_hist", "generation", "turn"})
_KIND = Kind("gdn-jax-pool", 1, _NAMES, "pool file", "gdn_jax.save_pool")


def save_pool(path: str | os.PathLike[str], pool: StatePool) -> None:
    """Write a pool to a safetensors file, atomically, in the manner of :func:`save_state`.

    ``S`` and ``conv_hist`` of the U slots in use, ascending [L, U, ..], and the ``generation`` and
    ``turn`` of all N. The file appears under ``path`` whole or not at all: a process that dies
    on the way leaves the old file, and at most a hidden file ``.NAME.xxxxxxxx`` beside it.

    Raises:
        ShapeError: not a pool, or one whose arrays do not fit its configuration.
        SlotError: the pool is traced.
        StateFileError: a slot in use is not finite (the message names it); nothing is written.
    """
    check_pool("save_pool", pool)
    used = pool.used
    arrays = pool.export(used)
    for i, slot in enumerate(used):
        for name, x in arrays.items():
            where = f"{path}: not written: slot {slot}"
            check_finite(where, f"{name}[:, {slot}]", x[:, i], StateFileError)
    table = {name: np.asarray(x) for name, x in vars(pool.table).items()}
    write_sealed(path, arrays | table, _KIND, pool.cfg)


def load_pool(path: str | os.PathLike[str], cfg: GDNConfig) -> StatePool:
    """Read a pool written by :func:`save_pool`: every slot in use bit for bit, under its number.

    Generations and the order of the free slots are kept too; what a free slot held is not.

    Raises:
        ShapeError: ``cfg`` is not a GDNConfig.
        StateFileError: the file is missing, truncated or not a pool file; was written for another
            configuration; fails its checksum; holds arrays that do not fit each other; or a slot
            in use is not finite.
    """
    check_config("load_pool", cfg)
    arrays = read_sealed(path, _KIND, cfg)
    L, N = ((arrays[name].shape or (0,))[0] for name in ("S", "generation"))
    try:
        for name in ("generation", "turn"):
            check_array("table", name, arrays[name], [("N", N)], [np.int32])
        table = SlotTable(arrays["generation"], arrays["turn"])
        pool = dataclasses.replace(StatePool.create(cfg, L, N), table=table)
        return pool.import_(pool.used, arrays, donate=True)
    except ShapeError as error:
        raise StateFileError(f"{path}: {error}") from None
