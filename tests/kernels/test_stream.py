"""The streaming kernel: interpreted against NumPy, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kernels import stream
from tests.support.mosaic import VALUES


@pytest.mark.parametrize(
    ("shape", "ctas"), [((1, 8, 9, 64), 1), ((3, 16, 9, 64), 6), ((512,), 1), ((11, 512), 11)]
)
def test_every_word_is_added_once(shape: tuple[int, ...], ctas: int) -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, shape).astype(np.int32)
    found = stream.sums(jnp.asarray(words), after=jnp.full((3,), jnp.nan), interpret=VALUES)
    exact = words.reshape(ctas, -1).astype(np.int64).sum(axis=1)
    assert (np.abs(exact) >= 2**31).any(), "no sum wraps around"
    np.testing.assert_array_equal(found, exact.astype(np.int32))


@pytest.mark.parametrize(("N", "K", "ctas"), [(16384, 5120, 2560), (5120, 6144, 960)])
def test_the_int4_shapes_lower_for_cuda_with_the_int4_kernels_loads(
    N: int, K: int, ctas: int
) -> None:
    blocks = jax.ShapeDtypeStruct((N // 64, K // 64, 9, 64), jnp.int32)
    after = jax.ShapeDtypeStruct((7,), jnp.float32)
    traced = stream.sums.trace(blocks, after=after)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    call = next(line for line in text.splitlines() if "mosaic_gpu_v2" in line)
    assert "tensor<7xf32>" in call
    assert f"tensor<{ctas}x9x512xi32>" in call
    assert 18 << 10 <= 4 * N * K * 9 // 64 // ctas <= 23 << 10


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="513 words; the streaming kernel needs a multiple of 512"):
        stream.sums(jnp.zeros((513,), jnp.int32))
    with pytest.raises(ValueError, match="0 words"):
        stream.sums(jnp.zeros((0, 512), jnp.int32))
    with pytest.raises(ValueError, match="w is float32; it must be int32"):
        stream.sums(jnp.zeros((512,)))
