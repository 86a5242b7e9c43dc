"""What a JAX program does to functions, done to the public ones: one table.

Rows are functions ``run(state, rest)`` of a state that may be donated, or None, and all else;
columns are transformations. A cell that means nothing says why in :data:`WITHOUT`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gdn_jax as gdn
from tests.support.tools import assert_close, assert_same_bits

CFG = gdn.GDNConfig(32, 1, 2, 8, 4)
B, T, SLOTS = 2, 3, 3
ROUNDED = 5e-6
"""As MAX_REL["layer"]: two programs of the same sums."""


class Row(NamedTuple):
    """A function, what it is given, and how ``shard_map`` splits that over sequences."""

    run: Callable[[Any, Any], Any]
    state: Any
    rest: Any
    split: Any = None
    result: Any = P("rows")


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def table() -> dict[str, Row]:
    """Every row, by the function's name."""
    params = gdn.init_params(jax.random.key(0), CFG)
    state = jax.tree.map(lambda x: normal(*x.shape), gdn.init_state(CFG, B))
    stack = jax.tree.map(lambda x: x[None], state)
    x, xs = normal(B, CFG.d_model), normal(B, T, CFG.d_model)
    bank = gdn.LayerBank(CFG, 1).preload(0, params)
    pool, slots = gdn.StatePool.create(CFG, 1, SLOTS).alloc(B)
    _, pool = bank.step_slots(pool, 0, x, slots)
    _, record = bank.draft_slots(pool, 0, xs, slots)
    rule = (
        normal(B, T, 1, 8) / 3,
        normal(B, T, 1, 8, seed=1) / 3,
        normal(B, T, 2, 4),
        -jnp.abs(normal(B, T, 2)),
        jax.nn.sigmoid(normal(B, T, 2)),
    )
    weight = gdn.quantize_q4(normal(8, 32))
    layer, slab = (P(), P("rows")), P(None, "rows")
    accepted = jnp.array([1, 3], jnp.int32)
    chunk = functools.partial(gdn.chunk_gated_delta_rule, chunk_size=16)
    return {
        "decode_step": Row(
            lambda s, r: gdn.decode_step(r[0], s, r[1], CFG), state, (params, x), layer
        ),
        "decode": Row(lambda s, r: gdn.decode(r[0], s, r[1], CFG), state, (params, xs), layer),
        "prefill": Row(
            lambda s, r: gdn.prefill(r[0], s, r[1], CFG, chunk_size=16), state, (params, xs), layer
        ),
        "trace_step": Row(
            lambda s, r: gdn.trace_step(r[0], s, r[1], CFG), state, (params, x), layer
        ),
        "recurrent_gated_delta_rule": Row(
            lambda s, r: gdn.recurrent_gated_delta_rule(*r, initial_state=s),
            state.S,
            rule,
            P("rows"),
        ),
        "chunk_gated_delta_rule": Row(
            lambda s, r: chunk(*r, initial_state=s), state.S, rule, P("rows")
        ),
        "causal_conv1d": Row(
            lambda s, r: gdn.causal_conv1d(r[0], s, r[1]),
            state.conv_hist,
            (normal(B, T, CFG.conv_dim), params.conv_weight),
            (P("rows"), P()),
        ),
        "q4_matmul": Row(lambda _, x: gdn.q4_matmul(x, weight), None, x, P("rows")),
        "dequantize": Row(lambda _, w: gdn.dequantize(w), None, weight),
        "LayerBank.step": Row(
            lambda s, x: bank.step(s, 0, x), stack, x, P("rows"), (P("rows"), slab)
        ),
        "LayerBank.decode": Row(
            lambda s, xs: bank.decode(s, 0, xs), stack, xs, P("rows"), (P("rows"), slab)
        ),
        "LayerBank.step_slots": Row(lambda s, r: bank.step_slots(s, 0, *r), pool, (x, slots)),
        "LayerBank.draft_slots": Row(
            lambda _, r: bank.draft_slots(r[0], 0, *r[1:]), None, (pool, xs, slots)
        ),
        "StatePool.commit": Row(
            lambda s, r: s.commit({0: r[0]}, *r[1:]), pool, (record, slots, accepted)
        ),
    }


NO_STATE = "it gives no state back in the place of one"
INTEGERS = "a matrix of integers is no differentiable operand"
ONE_POOL = "the slots of a pool are rows of one device's arrays; each device has a pool"
WITHOUT: dict[tuple[str, str], str] = {
    ("q4_matmul", "donation"): NO_STATE,
    ("dequantize", "donation"): NO_STATE,
    ("dequantize", "vmap"): "a Q4Array is one matrix",
    ("dequantize", "grad"): INTEGERS,
    ("dequantize", "checkpoint"): INTEGERS,
    ("dequantize", "shard_map"): "it has no sequences",
    ("LayerBank.draft_slots", "donation"): "it leaves the pool as it is",
    ("LayerBank.step_slots", "shard_map"): ONE_POOL,
    ("LayerBank.draft_slots", "shard_map"): ONE_POOL,
    ("StatePool.commit", "shard_map"): ONE_POOL,
}


@functools.cache
def jitted(name: str) -> Any:
    return jax.jit(table()[name].run)


def is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def assert_near(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for i, (x, y) in enumerate(pairs):
        assert_close(x, y, ROUNDED, f"output {i}")


def total(row: Row) -> tuple[Callable[[list[jax.Array]], jax.Array], list[jax.Array]]:
    """A weighted sum of all outputs as a function of the floats, and those."""
    leaves, tree = jax.tree.flatten((row.state, row.rest))
    floats = [x for x in leaves if is_float(x)]

    def sum_of(floats: list[jax.Array]) -> jax.Array:
        given = iter(floats)
        state, rest = jax.tree.unflatten(tree, [next(given) if is_float(x) else x for x in leaves])
        outputs = [x for x in jax.tree.leaves(row.run(state, rest)) if is_float(x)]
        return sum((jnp.vdot(x, normal(*x.shape, seed=7)) for x in outputs), jnp.float32(0))

    return sum_of, floats


@functools.cache
def gradient(name: str) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradient, and the place where it is taken."""
    sum_of, floats = total(table()[name])
    return jax.jit(jax.grad(sum_of))(floats), floats


def check_vmap(name: str, row: Row) -> None:
    """An extra leading axis is a loop."""
    each = [
        jax.tree.map(lambda x, f=f: x * x.dtype.type(f) if is_float(x) else x, row[1:3])
        for f in (1, 0.9)
    ]
    both = jax.tree.map(lambda *x: jnp.stack(x), *each)
    found = jax.jit(jax.vmap(row.run))(*both)
    expected = jax.tree.map(lambda *x: jnp.stack(x), *(jitted(name)(*one) for one in each))
    assert_near(found, expected)


def check_grad(name: str, row: Row) -> None:
    """Along a direction, against the difference of two values."""
    slope, floats = gradient(name)
    sum_of = jax.jit(total(row)[0])
    direction = [normal(*x.shape, seed=i) for i, x in enumerate(floats)]
    length = jnp.sqrt(sum(jnp.vdot(d, d) for d in direction))
    ends = [
        sum_of([x + h * d / length for x, d in zip(floats, direction, strict=True)])
        for h in (0.02, -0.02)
    ]
    along = sum(jnp.vdot(s, d) for s, d in zip(slope, direction, strict=True)) / length
    size = jnp.sqrt(sum(jnp.vdot(s, s) for s in slope))
    difference = (ends[0] - ends[1]) / 0.04
    assert size > 0
    assert abs(along - difference) <= 2e-3 * size, (along, difference, size)


def check_checkpoint(name: str, row: Row) -> None:
    """What is computed again in the backward pass gives the same gradient."""
    again = row._replace(run=jax.checkpoint(row.run))
    sum_of, floats = total(again)
    assert_near(jax.jit(jax.grad(sum_of))(floats), gradient(name)[0])


def check_donation(name: str, row: Row) -> None:
    """The state's buffers are taken, and the bits are equal."""
    mine = jax.tree.map(lambda x: jnp.array(x, copy=True), row.state)
    found = jax.jit(row.run, donate_argnums=0)(mine, row.rest)
    assert all(x.is_deleted() for x in jax.tree.leaves(mine) if is_float(x))
    assert_same_bits(found, jitted(name)(row.state, row.rest))


def check_jit(name: str, row: Row) -> None:
    """Lowered and compiled ahead, it is called like the jitted function, with equal bits."""
    compiled = jitted(name).lower(row.state, row.rest).compile()
    assert_same_bits(compiled(row.state, row.rest), jitted(name)(row.state, row.rest))


def check_shard_map(name: str, row: Row) -> None:
    """Over sequences with types of varying values: over four devices see tests/support/sharded."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    state = P(None, "rows") if name.startswith("LayerBank") else P("rows")
    mapped = jax.shard_map(row.run, mesh=mesh, in_specs=(state, row.split), out_specs=row.result)
    assert_near(jax.jit(mapped)(row.state, row.rest), jitted(name)(row.state, row.rest))


COLUMNS = {
    "jit": check_jit,
    "vmap": check_vmap,
    "grad": check_grad,
    "checkpoint": check_checkpoint,
    "donation": check_donation,
    "shard_map": check_shard_map,
}
ROWS = (
    *("decode_step", "decode", "prefill", "trace_step", "recurrent_gated_delta_rule"),
    *("chunk_gated_delta_rule", "causal_conv1d", "q4_matmul", "dequantize", "LayerBank.step"),
    *("LayerBank.decode", "LayerBank.step_slots", "LayerBank.draft_slots", "StatePool.commit"),
)


def cells() -> list[Any]:
    """Every cell that means something; gradients through pools are compiled for long."""
    return [
        pytest.param(
            row,
            column,
            marks=[pytest.mark.slow] if "." in row and column in ("grad", "checkpoint") else [],
        )
        for row in ROWS
        for column in COLUMNS
        if (row, column) not in WITHOUT
    ]


@pytest.mark.parametrize(("row", "column"), cells())
def test_transformed(row: str, column: str) -> None:
    COLUMNS[column](row, table()[row])


def test_the_table_is_whole() -> None:
    assert tuple(table()) == ROWS
    assert all(row in ROWS and column in COLUMNS for row, column in WITHOUT)


def test_gradients_of_prefill_and_of_decode_agree() -> None:
    """Measured 5e-6 apart on longer rows; the limit leaves a factor of four."""
    prefill, decode = gradient("prefill")[0], gradient("decode")[0]
    for x, y in zip(prefill, decode, strict=True):
        assert_close(x, y, 2e-5)
