"""The chunked delta rule on the kernels: interpreted against float64, lowered for CUDA."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.ops import chunk_pallas
from pallas_kernels.kernels.chunk_inside import inside
from pallas_kernels.kernels.chunk_through import through
from pallas_kernels.mosaic.unit_lower import BLOCK, substituted
from tests.support.chunk_contract import HK, HV, ChunkRule, draw, states
from tests.support.mosaic import VALUES
from tests.support.tools import assert_close, assert_same_bits, pretend_device


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of capability 9.0, whose kernels the interpreter runs."""
    pretend_device(monkeypatch)
    for kernel in (inside, through):
        run = functools.partial(kernel, interpret=VALUES)
        monkeypatch.setattr(chunk_pallas, kernel.__name__, run)


def rule(**operands: Any) -> tuple[jax.Array, jax.Array]:
    """On the kernels, compiled anew: what a test has replaced is not kept."""
    run = functools.partial(gdn.chunk_gated_delta_rule, scale=0.3, backend="pallas")
    return jax.jit(run)(**operands)


class TestKernels(ChunkRule):
    LIMITS: ClassVar = {"float32": 2e-6, "bfloat16": 1e-2, "hard": 1e-5}

    @pytest.fixture(autouse=True)
    def _interpreted(self, interpreted: None) -> None:
        pass

    def run(self, **operands: Any) -> tuple[jax.Array, jax.Array]:
        return rule(**operands)


@pytest.mark.slow
def test_derivatives_are_those_of_xla(interpreted: None) -> None:
    drawn, S = draw(20), states(64, 64)

    def loss(drawn: Any, S: jax.Array, backend: str) -> jax.Array:
        o, after = gdn.chunk_gated_delta_rule(**drawn, initial_state=S, backend=backend)
        return jnp.sum(o) + jnp.sum(after)

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    found, wanted = (gradient(drawn, S, name) for name in ("pallas", "xla"))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), found, wanted)


@pytest.mark.slow
def test_under_vmap_it_runs_one_after_another(interpreted: None) -> None:
    drawn = draw(20, B=2, dtype="bfloat16")
    each = jax.vmap(lambda drawn: rule(**{n: x[None] for n, x in drawn.items()}))(drawn)
    for found, wanted in zip(each, rule(**drawn), strict=True):
        assert_same_bits(found[:, 0], wanted)


@pytest.mark.slow
def test_prefill_of_a_layer(interpreted: None) -> None:
    cfg = gdn.GDNConfig(64, HK, HV, 64, 64)
    params = gdn.init_params(jax.random.key(0), cfg)
    xs = jax.random.normal(jax.random.key(1), (2, 20, 64))
    lengths = jnp.asarray([20, 9], jnp.int32)
    start = gdn.init_state(cfg, 2)

    def run(**options: Any) -> tuple[jax.Array, gdn.GDNState]:
        prefill = functools.partial(gdn.prefill, cfg=cfg, **options)
        return jax.jit(prefill)(params, start, xs, lengths=lengths)

    wanted, wanted_state = run(backend="xla")
    for precision, limit in (("float32", 5e-6), ("bfloat16", 5e-2)):
        ys, state = run(precision=precision, backend="pallas")
        assert_close(ys, wanted, limit, precision)
        assert_close(state.S, wanted_state.S, limit, precision)
        np.testing.assert_array_equal(ys[1, 9:], 0)


@pytest.mark.parametrize(
    ("K", "V", "dtype"),
    [
        (128, 128, "float32"),
        (128, 128, "bfloat16"),
        (64, 64, "float32"),
        (64, 128, "bfloat16"),
        (128, 64, "bfloat16"),
        (64, 128, "float32"),
    ],
)
def test_lowers_for_cuda(monkeypatch: pytest.MonkeyPatch, K: int, V: int, dtype: str) -> None:
    pretend_device(monkeypatch)

    def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    keys, values, gates = (1, 8192, 16, K), (1, 8192, 48, V), shaped(1, 8192, 48)
    q, v = shaped(*keys, dtype=dtype), shaped(*values, dtype=dtype)
    rule = jax.jit(functools.partial(gdn.chunk_gated_delta_rule, backend="pallas"))
    text = rule.trace(q, q, v, gates, gates).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2


def test_what_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(20)
    with pytest.raises(gdn.BackendUnavailableError, match=r"no CUDA GPU.*backend='xla' runs it"):
        gdn.chunk_gated_delta_rule(**drawn, backend="pallas")
    pretend_device(monkeypatch)
    with pytest.raises(
        gdn.BackendUnavailableError, match="chunks of 32 tokens, the kernel needs 64"
    ):
        gdn.chunk_gated_delta_rule(**drawn, chunk_size=32, backend="pallas")
    with pytest.raises(gdn.BackendUnavailableError, match="K is 32"):
        gdn.chunk_gated_delta_rule(**draw(20, K=32), backend="pallas")
    assert gdn.select_backend("chunk_gated_delta_rule", K=128, V=128) == "pallas"
    assert gdn.select_backend("chunk_gated_delta_rule", K=128, V=128, chunk=16) == "xla"
    for capability in ("8.0", "10.0"):
        pretend_device(monkeypatch, capability)
        with pytest.raises(gdn.BackendUnavailableError, match=r"kernels over chunks need 9\.0"):
            gdn.chunk_gated_delta_rule(**drawn, backend="pallas")
        assert gdn.select_backend("prefill", gdn.PRESETS["qwen3.5-27b"]) == "xla"


def test_the_substitution_that_kernels_unroll() -> None:
    rng = np.random.default_rng(0)
    A = np.tril(rng.normal(size=(BLOCK, BLOCK)), -1)
    identity = [row.copy() for row in np.eye(BLOCK)]
    x = substituted(
        identity, lambda i, j: list(-A[i, j : j + 4]), lambda a, b, c: a * b + c, lambda: None
    )
    np.testing.assert_allclose(np.stack(x), np.linalg.inv(np.eye(BLOCK) + A), rtol=1e-10, atol=1e-9)
