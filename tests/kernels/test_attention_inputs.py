"""A token's queries, gates, keys and values on the kernel against float64, and for CUDA."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kernels import attention_inputs as kernel
from pallas_kernels.kernels.attention_inputs import Norms, Slices, Turn
from tests.gpu_small import exact_attention_inputs
from tests.support.mosaic import VALUES
from tests.support.tools import assert_close, assert_same_bits

EPS = 1e-2
H, G, N, SPLITS = 4, 2, 6, 3
PLACE = (5, -1, 0)
"""The second row is idle."""


def draw(A: int, half: int, B: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    angles = rng.uniform(0, 2 * np.pi, (B, half))
    return {
        "slices": Slices(*(normal(SPLITS, B, n * A) for n in (2 * H, G, G))),
        "norms": Norms(normal(A), normal(A)),
        "turn": Turn(*(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))),
        "caches": [normal(B, G, N, A) for _ in "kv"],
    }


def run(drawn: dict[str, Any], place: Any, dtype: Any = jnp.float32) -> list[jax.Array]:
    caches = [x.astype(dtype) for x in drawn["caches"]]
    at, given = jnp.asarray(place, jnp.int32), [drawn[x] for x in ("slices", "norms", "turn")]
    return list(kernel.attention_inputs(*given, at, *caches, eps=EPS, interpret=VALUES))


@pytest.mark.parametrize(("A", "half"), [(256, 32), (128, 64)])
def test_heads_agree_with_float64_and_go_where_they_belong(A: int, half: int) -> None:
    drawn = draw(A, half, len(PLACE))
    q, gate, *caches = run(drawn, PLACE)
    exact = exact_attention_inputs(drawn["slices"], drawn["norms"], drawn["turn"], EPS)
    assert_close(q, exact[0], 1e-6, "q")
    assert_close(gate, exact[1], 1e-6, "gate")
    for name, found, before, new in zip("kv", caches, drawn["caches"], exact[2:], strict=True):
        found, wanted = np.array(found), np.array(before)
        for b, at in enumerate(PLACE):
            if at >= 0:
                assert_close(found[b, :, at], new[b], 1e-6, f"{name} of row {b}")
                found[b, :, at] = wanted[b, :, at] = 0
        assert_same_bits(found, wanted)


@pytest.mark.slow
def test_narrow_caches_round_once_and_rows_are_alone() -> None:
    drawn = draw(128, 32, 3)
    wide, narrow = run(drawn, (1, 2, 3)), run(drawn, (1, 2, 3), jnp.bfloat16)
    for i, at in ((0, ()), (2, (1,)), (3, (1,))):
        place = (slice(None), slice(None), *at)
        same = wide[i][0][None][place].astype(jnp.bfloat16)
        assert_same_bits(narrow[i][0][None][place], same)
    assert narrow[1].dtype == jnp.float32
    q, k, v = drawn["slices"]
    nan = Slices(q.at[:, 0].set(np.nan), k.at[:, 0].set(np.nan), v)
    spoilt = run(drawn | {"slices": nan}, (1, 2, 3))
    for found, clean in zip(spoilt, wide, strict=True):
        assert_same_bits(found[1:], clean[1:])
    assert np.isnan(np.asarray(spoilt[0][0])).all()


@pytest.mark.parametrize("B", [1, 8])
def test_the_kernel_lowers_for_cuda_at_the_27b_shape(B: int) -> None:
    def like(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    slices = Slices(*(like(10, B, n) for n in (2 * 24 * 256, 1024, 1024)))
    given = (slices, Norms(like(256), like(256)), Turn(like(B, 32), like(B, 32)))
    caches = [like(B, 4, 512, 256, dtype=jnp.bfloat16)] * 2
    at = like(B, dtype=jnp.int32)
    traced = kernel.attention_inputs.trace(*given, at, *caches, eps=EPS, interpret=None)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


def test_which_heads_it_takes() -> None:
    assert kernel.unavailable_reason(256, 64) is None
    assert kernel.unavailable_reason(128, 128) is None
    for A, R in ((64, 64), (256, 32), (256, 65)):
        assert f"heads of {A} of which {R}" in (kernel.unavailable_reason(A, R) or "")
