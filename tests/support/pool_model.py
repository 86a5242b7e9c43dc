"""A pool beside a plain model that says which seed's arrays every slot holds."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax as gdn
from tests.support.cases import Arrays, state_arrays
from tests.support.tools import assert_refused

CFG = gdn.PRESETS["tiny"]
L, N = 3, 6


@functools.cache
def one(seed: int) -> Arrays:
    """What a sequence may hold: S [L, HV, K, V] and conv_hist [L, W-1, C]; zeros for seed 0."""
    arrays = state_arrays(CFG, (L,), seed)
    return arrays if seed else {name: np.zeros_like(x) for name, x in arrays.items()}


def many(seeds) -> Arrays:
    parts = [one(seed) for seed in seeds]
    return {name: np.stack([part[name] for part in parts], 1) for name in ("S", "conv_hist")}


def filled(n: int, num_slots: int = N) -> gdn.StatePool:
    """Slots 0..n-1 in use and holding seeds 1..n."""
    pool, slots = gdn.StatePool.create(CFG, L, num_slots).alloc(n)
    return pool.import_(slots, many(range(1, n + 1)))


def poisoned(pool: gdn.StatePool, keep) -> gdn.StatePool:
    """NaN in every slot but these, behind the pool's back."""
    other = np.setdiff1d(np.arange(pool.num_slots), keep)
    arrays = {name: getattr(pool, name).at[:, other].set(jnp.nan) for name in ("S", "conv_hist")}
    return dataclasses.replace(pool, **arrays)


def bits(pool: gdn.StatePool) -> list[np.ndarray]:
    return [np.array(leaf).view(np.int32) for leaf in jax.tree.leaves(pool)]


def assert_holds(pool: gdn.StatePool, model: dict[int, int]) -> None:
    """Exactly the slots of the model are in use, each with the arrays of its seed."""
    assert list(pool.used) == sorted(model)
    assert pool.occupancy == len(model)
    for slot, seed in model.items():
        for name, x in one(seed).items():
            assert np.array_equal(
                np.asarray(getattr(pool, name))[:, slot].view(np.int32), x.view(np.int32)
            ), f"{name} of slot {slot}"


def refused(pool: gdn.StatePool, call: Callable, *said: str, error: type = gdn.SlotError) -> None:
    """The call raises, names what it found, and leaves the pool as it was."""
    before = bits(pool)
    assert_refused(lambda: call(pool), *said, error=error)
    for x, y in zip(before, bits(pool), strict=True):
        assert np.array_equal(x, y)
