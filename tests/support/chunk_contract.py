"""What the delta rule over chunks must hold on every backend; one subclass a backend."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax import oracle
from tests.support.tools import assert_close, assert_same_bits

HK, HV = 1, 2


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


HARD = {
    "one key again and again": lambda d: (
        d | {"k": d["k"] * 0 + d["k"][:, :1], "beta": d["g"] * 0 + 1}
    ),
    "no decay": lambda d: d | {"g": d["g"] * 0, "beta": d["g"] * 0 + 1},
    "all is forgotten": lambda d: d | {"g": d["g"] * 0 - 50},
    "no keys": lambda d: d | {"k": d["k"] * 0},
    "strong and weak decay": lambda d: d | {"g": jnp.where(d["g"] < -0.1, -30.0, -1e-6)},
}


class ChunkRule:
    """The rule over chunks of 64 tokens, with a scale of 0.3."""

    LIMITS: ClassVar[dict[str, float]]
    """By the dtype of q, k and v; "hard" for float32 and the gates and keys of ``HARD``."""

    def run(self, **operands: Any) -> tuple[jax.Array, jax.Array]:
        """The operator on this backend."""
        raise NotImplementedError

    @pytest.mark.parametrize(
        ("T", "K", "V", "B", "dtype"),
        [
            (1, 64, 64, 2, "float32"),
            (130, 64, 128, 1, "float32"),
            # More chunks than stages.
            (260, 128, 64, 1, "bfloat16"),
        ],
    )
    def test_agrees_with_float64(self, T: int, K: int, V: int, B: int, dtype: str) -> None:
        drawn, S = draw(T, K, V, B, dtype), states(K, V, B)
        o, after = self.run(**drawn, initial_state=S)
        assert o.dtype == dtype
        wanted_o, wanted_S = exact(drawn, S)
        assert_close(o.astype(jnp.float32), wanted_o, self.LIMITS[dtype], "o")
        assert_close(after, wanted_S, self.LIMITS[dtype], "S")

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_packed_sequences_do_not_see_each_other(self, dtype: str) -> None:
        """Drawn ones, among them an empty one, and hard ones: one program for all."""
        plain = {f"{n} tokens": draw(n, dtype=dtype) for n in (37, 51, 40, 0, 1)}
        each = plain | {name: change(draw(70, dtype=dtype)) for name, change in HARD.items()}
        lengths = [drawn["g"].shape[1] for drawn in each.values()]
        cu: Any = np.cumsum([0, *lengths]).astype(np.int32)
        # Behind the last sequence: of no meaning, and seen by nobody.
        behind = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), draw(2, dtype=dtype))
        packed = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *each.values(), behind)
        S = states(64, 64, len(each))
        o, after = self.run(**packed, initial_state=S, cu_seqlens=cu)
        np.testing.assert_array_equal(o[:, cu[-1] :], 0)
        hard = self.LIMITS["hard"] if dtype == "float32" else 2 * self.LIMITS[dtype]
        for i, (case, drawn) in enumerate(each.items()):
            if lengths[i] == 0:
                assert_same_bits(after[i], S[i])
                continue
            limit = hard if case in HARD else self.LIMITS[dtype]
            wanted_o, wanted_S = exact(drawn, S[i : i + 1])
            assert_close(o[:, cu[i] : cu[i + 1]].astype(jnp.float32), wanted_o, limit, f"o, {case}")
            assert_close(after[i], wanted_S[0], limit, f"S, {case}")
