"""The chunked delta rule on the kernels: interpreted against float64, lowered for CUDA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.ops import chunk_pallas
from pallas_kernels.kernels.chunk_inside import inside
from pallas_kernels.kernels.chunk_through import through
from pallas_kernels.mosaic.unit_lower import BLOCK, substituted
from tests.support.mosaic import VALUES
from tests.support.tools import assert_close, assert_same_bits, pretend_device

MAX_REL = {"float32": 2e-6, "bfloat16": 1e-2}
HK, HV = 1, 2


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


def draw(T: int, K: int = 64, V: int = 64, B: int = 1, dtype: Any = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(T)
    q, k = rng.normal(size=(2, B, T, HK, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -np.exp(rng.uniform(np.log(1e-4), np.log(2.0), (B, T, HV)))
    beta, v = rng.uniform(0.02, 0.98, (B, T, HV)), rng.normal(size=(B, T, HV, V))
    wide = {name: jnp.asarray(x, jnp.float32) for name, x in {"g": g, "beta": beta}.items()}
    return {n: jnp.asarray(x, dtype) for n, x in {"q": q, "k": k, "v": v}.items()} | wide


def states(K: int, V: int, N: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=(N, HV, K, V)), jnp.float32)


def exact(drawn: dict[str, Any], S: Any) -> tuple[np.ndarray, np.ndarray]:
    operands: dict[str, Any] = {
        name: np.asarray(x.astype(jnp.float32)) for name, x in drawn.items()
    }
    return oracle.recurrent_gated_delta_rule(**operands, initial_state=np.asarray(S), scale=0.3)


@pytest.mark.parametrize(
    ("T", "K", "V", "B", "dtype"),
    [
        (1, 64, 64, 2, "float32"),
        (130, 64, 128, 1, "float32"),
        # More chunks than stages.
        (260, 128, 64, 1, "bfloat16"),
    ],
)
def test_agrees_with_float64(interpreted: None, T: int, K: int, V: int, B: int, dtype: str) -> None:
    drawn, S = draw(T, K, V, B, dtype), states(K, V, B)
    o, after = rule(**drawn, initial_state=S)
    assert o.dtype == dtype
    wanted_o, wanted_S = exact(drawn, S)
    assert_close(o.astype(jnp.float32), wanted_o, MAX_REL[dtype], "o")
    assert_close(after, wanted_S, MAX_REL[dtype], "S")


HARD = {
    "one key again and again": lambda d: (
        d | {"k": d["k"] * 0 + d["k"][:, :1], "beta": d["g"] * 0 + 1}
    ),
    "no decay": lambda d: d | {"g": d["g"] * 0, "beta": d["g"] * 0 + 1},
    "all is forgotten": lambda d: d | {"g": d["g"] * 0 - 50},
    "no keys": lambda d: d | {"k": d["k"] * 0},
    "strong and weak decay": lambda d: d | {"g": jnp.where(d["g"] < -0.1, -30.0, -1e-6)},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_sequences_do_not_see_each_other(interpreted: None, dtype: str) -> None:
    """Drawn ones, among them an empty one, and hard ones: one program for all."""
    plain = {f"{n} tokens": draw(n, dtype=dtype) for n in (37, 51, 40, 0, 1)}
    each = plain | {name: change(draw(70, dtype=dtype)) for name, change in HARD.items()}
    lengths = [drawn["g"].shape[1] for drawn in each.values()]
    cu: Any = np.cumsum([0, *lengths]).astype(np.int32)
    # Behind the last sequence: of no meaning, and seen by nobody.
    behind = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), draw(2, dtype=dtype))
    packed = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *each.values(), behind)
    S = states(64, 64, len(each))
    o, after = rule(**packed, initial_state=S, cu_seqlens=cu)
    np.testing.assert_array_equal(o[:, cu[-1] :], 0)
    hard = 1e-5 if dtype == "float32" else 2e-2
    for i, (case, drawn) in enumerate(each.items()):
        if lengths[i] == 0:
            assert_same_bits(after[i], S[i])
            continue
        limit = hard if case in HARD else MAX_REL[dtype]
        wanted_o, wanted_S = exact(drawn, S[i : i + 1])
        assert_close(o[:, cu[i] : cu[i + 1]].astype(jnp.float32), wanted_o, limit, f"o, {case}")
        assert_close(after[i], wanted_S[0], limit, f"S, {case}")


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
