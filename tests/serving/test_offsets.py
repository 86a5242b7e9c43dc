"""Element offsets at slot 5000 of a 27B stack: 48·5001·48·128·128 numbers, far beyond 2**31."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gdn_jax as gdn
from gdn_jax.layer.state import GDNState
from gdn_jax.serving.rows import step_rows
from tests.support.mosaic import kernel_of, operations
from tests.support.tools import pretend_device

CFG = gdn.PRESETS["qwen3.5-27b"]
L, N, B = 48, 5001, 2


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SHAPES: Any = (
    shaped(L, N, CFG.num_v_heads, CFG.head_k_dim, CFG.head_v_dim),
    shaped(L, N, CFG.conv_width - 1, CFG.conv_dim),
)
STATES = GDNState(*SHAPES)


def lowered(backend: str) -> Any:
    """One token of layer 47 for B slots of the pool, nothing allocated."""
    params = jax.eval_shape(lambda key: gdn.init_params(key, CFG), jax.random.key(0))
    slots = shaped(B, dtype=jnp.int32)
    step = functools.partial(step_rows, cfg=CFG, backend=backend)
    traced = jax.jit(lambda p, s, x, r, w: step(p, s, L - 1, x, (r, w)), donate_argnums=1).trace(
        params, STATES, shaped(B, CFG.d_model), slots, slots
    )
    return traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")


def test_kernels_index_the_pool_by_axis_and_in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch)
    module = lowered("pallas")
    calls = operations(module, "stablehlo.custom_call")
    kernels = [c for c in calls if "mosaic" in str(c.attributes["call_target_name"])]
    assert len(kernels) == 3
    indexed = {"S": 0, "conv_hist": 0}
    for call in kernels:
        with kernel_of(call) as kernel:
            prefix = "stable_mosaic_gpu."
            for op in operations(kernel, f"{prefix}builtin.unrealized_conversion_cast"):
                for name, whole in vars(STATES).items():
                    shape = "x".join(map(str, whole.shape))
                    if f"memref<{shape}xf32>" not in str(op.results[0].type):
                        continue
                    # The compiler multiplies strides of a descriptor in i64.
                    assert "i64, array<" in str(op.operands[0].type)
                    for use in op.results[0].uses:
                        assert use.owner.name == f"{prefix}memref.subview"
                        offsets = list(use.owner.operands)[1:]
                        assert [str(x.type) for x in offsets] == ["index"] * len(offsets)
                        assert len(offsets) >= 3, "layer, slot and head or channel"
                        indexed[name] += 1
    assert min(indexed.values()) >= 2, "read and written"


def test_xla_indexes_the_pool_by_axis() -> None:
    module = lowered("xla")
    shapes = {name: "x".join(map(str, x.shape)) for name, x in vars(STATES).items()}
    for op in operations(module, "stablehlo.reshape", "stablehlo.transpose"):
        assert not any(f"tensor<{shape}" in str(op.operands[0].type) for shape in shapes.values())
    touched = operations(
        module, "stablehlo.gather", "stablehlo.scatter", "stablehlo.dynamic_slice",
        "stablehlo.dynamic_update_slice",
    )  # fmt: skip
    for shape in shapes.values():
        mine = [op for op in touched if f"tensor<{shape}" in str(op.operands[0].type)]
        assert len(mine) >= 2, "read and written"
