"""Random calls of a pool against a plain model, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn_jax as gdn
from tests.support.pool_model import CFG, L, N, assert_holds, bits, filled, many, poisoned

OPS = st.sampled_from(["alloc", "free", "reset", "fork", "copy", "import"])
IDS = st.lists(st.integers(-1, N), max_size=4)
CALLS = st.tuples(OPS, IDS, IDS, st.booleans(), st.sampled_from([True, True, True, False]))


@pytest.mark.slow
@given(st.integers(0, N), st.lists(CALLS, min_size=4, max_size=16), st.booleans())
def test_programs_of_calls_against_a_model(start: int, program, jax_table: bool) -> None:
    """Right calls do what the model does, wrong ones change nothing; free slots hold NaN.

    A call that aims well takes its slots from those in use, each once.
    """
    pool = filled(start) if start else gdn.StatePool.create(CFG, L, N)
    model, seed = {slot: slot + 1 for slot in range(start)}, start + 1
    for op, ids, more, donate, aimed in program:
        if aimed and model:
            ids = list(dict.fromkeys(sorted(model)[i % len(model)] for i in ids))
            if op == "copy":
                more = [sorted(model)[i % len(model)] for i in more or [0]]
        pool = poisoned(pool, sorted(model))
        if jax_table:
            pool = dataclasses.replace(pool, table=jax.tree.map(jnp.asarray, pool.table))
        before, old = bits(pool), pool
        right = set(ids) <= model.keys() and len(set(ids)) == len(ids)
        new, raised = dict(model), None
        source, src = ids[0] if ids else 0, (more * 4)[: len(ids)]
        slots = jnp.asarray(ids, jnp.int32)
        try:
            if op == "alloc":
                right = N - len(model) >= len(ids)
                pool, got = pool.alloc(len(ids), donate=donate)
                new |= dict.fromkeys(got.tolist(), 0)
            elif op == "free":
                pool = pool.free(slots)
                new = {slot: held for slot, held in model.items() if slot not in ids}
            elif op == "reset":
                pool = pool.reset(slots, donate=donate)
                new |= dict.fromkeys(ids, 0)
            elif op == "fork":
                right = source in model and N - len(model) >= len(more)
                pool, got = pool.fork(source, len(more), donate=donate)
                new |= dict.fromkeys(got.tolist(), model.get(source))
            elif op == "copy":
                right = right and set(src) <= model.keys() and len(src) == len(ids)
                pool = pool.copy(jnp.asarray(src, jnp.int32), slots, donate=donate)
                new |= {d: model[s] for s, d in zip(src, ids, strict=True)}
            else:
                seeds = range(seed, seed + len(ids))
                arrays = many(seeds) if ids else many([0])
                arrays = {name: x[:, : len(ids)] for name, x in arrays.items()}
                pool = pool.import_(slots, arrays, donate=donate)
                new |= dict(zip(ids, seeds, strict=True))
                seed += len(ids)
        except (gdn.SlotError, gdn.PoolFullError) as error:
            raised = error
        assert right == (raised is None), f"{op} {ids} {more}: {raised}"
        if raised is None:
            grown = {"alloc": len(ids), "fork": len(more), "free": -len(ids)}.get(op, 0)
            assert len(new) - len(model) == grown
            model = new
        else:
            full = op == "alloc" or (op == "fork" and source in model)
            assert isinstance(raised, gdn.PoolFullError) == full
        assert_holds(pool, model)
        if not donate or op == "free" or not right:
            assert all(map(np.array_equal, before, bits(old)))
