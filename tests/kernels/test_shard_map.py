"""Operators of one kernel inside of ``jax.shard_map``: lowered for CUDA.

Values over several devices: tests/layer/test_shard_map.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gdn_jax as gdn
from tests.support.tools import pretend_device

B, T, C = 4, 5, 64


def q4_product(x: jax.Array, packed: jax.Array, scales: jax.Array, backend: str) -> jax.Array:
    return gdn.q4_matmul(x, gdn.Q4Array(packed, scales), backend=backend)


def fresh_history(x: jax.Array, weight: jax.Array, backend: str) -> Any:
    """From frames that are the same on every device."""
    return gdn.causal_conv1d(x, jnp.zeros((1, 3, C)), weight, backend=backend)


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHT = floats(64, C // 8, dtype=jnp.int32), floats(64, C // 32, dtype=jnp.float16)
KEYS, GATES = floats(B, T, 1, 64), floats(B, T, 2)
TOKENS = KEYS, KEYS, floats(B, T, 2, 64), GATES, GATES
ROWS, ALL = P("rows"), P()
CALLS: dict[str, tuple[Any, Any, tuple[P, ...]]] = {
    "causal_conv1d": (
        gdn.causal_conv1d,
        (floats(B, T, C), floats(B, 3, C), floats(C, 4)),
        (ROWS, ROWS, ALL),
    ),
    "fresh_history": (fresh_history, (floats(B, T, C), floats(C, 4)), (ROWS, ALL)),
    "q4_matmul": (q4_product, (floats(B, C), *WEIGHT), (ROWS, ALL, ALL)),
    "recurrent": (gdn.recurrent_gated_delta_rule, TOKENS, (ROWS,) * 5),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_lowers_for_cuda(monkeypatch: pytest.MonkeyPatch, name: str, check_vma: bool) -> None:
    call, operands, specs = CALLS[name]
    pretend_device(monkeypatch)
    run = functools.partial(call, backend="pallas")
    mesh = jax.sharding.AbstractMesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=check_vma)
    text = jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
