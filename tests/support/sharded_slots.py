"""A bank and a pool mapped over four devices, by sequences: a program that needs all four."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import gdn_jax as gdn
from gdn_jax.serving.drafts import SCHEMES

CFG = gdn.GDNConfig(64, 2, 4, 16, 8)
B, T, L, LAYER = 8, 4, 2, 1
LIMIT = 5e-6
"""As MAX_REL["layer"]: another number of rows is another program."""
TREE = np.array([[-1, 0, 0, 2], [-1, -1, 0, 1]] * (B // 2), np.int32)


def decoded(bank: gdn.LayerBank, xs: jax.Array, *_: Any) -> Any:
    """T tokens from states that begin here."""
    return bank.decode(bank.init_state(len(xs)), LAYER, xs)


def stepped(bank: gdn.LayerBank, xs: jax.Array, *_: Any) -> Any:
    """One token in the slots of a pool that is created here."""
    pool, slots = gdn.StatePool.create(CFG, L, len(xs)).alloc(len(xs))
    y, pool = bank.step_slots(pool, LAYER, xs[:, 0], slots)
    return y, pool.states


def drafted(bank: gdn.LayerBank, xs: jax.Array, parents: Any, accepted: Any, scheme: str) -> Any:
    """A draft and its commit, in the slots of a pool that is created here."""
    pool, slots = gdn.StatePool.create(CFG, L, len(xs)).alloc(len(xs))
    ys, record = bank.draft_slots(pool, LAYER, xs, slots, parents=parents, scheme=scheme)
    return ys, pool.commit({LAYER: record}, slots, accepted).states


def main() -> None:
    """Every mapping against one device; an assertion or what jax says where one does not hold."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 2)
    bank = gdn.LayerBank(CFG, L).preload(LAYER, gdn.init_params(keys[0], CFG))
    xs = jax.random.normal(keys[1], (B, T, CFG.d_model))
    accepted = jnp.arange(B, dtype=jnp.int32) % (T + 1)

    def chain(scheme: str) -> Any:
        return lambda bank, xs, _, accepted: drafted(bank, xs, None, accepted, scheme)

    def tree(scheme: str) -> Any:
        return lambda bank, xs, parents, accepted: drafted(bank, xs, parents, accepted, scheme)

    cases = {"decode": decoded, "step_slots": stepped}
    cases |= {f"{scheme} of a chain": chain(scheme) for scheme in SCHEMES}
    cases |= {f"{scheme} of a tree": tree(scheme) for scheme in SCHEMES}
    operands = (bank, xs, jnp.asarray(TREE), accepted)
    specs = (P(), P("rows"), P("rows"), P("rows"))
    expected = {name: jax.jit(run)(*operands) for name, run in cases.items()}
    for name, check in itertools.product(cases, (True, False)):
        mapped = jax.shard_map(
            cases[name], mesh=mesh, in_specs=specs, out_specs=(P("rows"), P(None, "rows")),
            check_vma=check,
        )  # fmt: skip
        found = jax.jit(mapped)(*operands)
        for x, ref in zip(jax.tree.leaves(found), jax.tree.leaves(expected[name]), strict=True):
            x, ref = np.asarray(x), np.asarray(ref)
            assert np.abs(x - ref).max() <= LIMIT * np.abs(ref).max(), f"{name}, check_vma={check}"


if __name__ == "__main__":
    main()
