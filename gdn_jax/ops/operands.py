"""The operands of both forms of the delta rule: their checks, and their form in float32."""

import jax.numpy as jnp

from gdn_jax._core.checks import FLOATS, check_array
from gdn_jax.errors import ShapeError
from gdn_jax.ops.recurrence import l2_normalise
from gdn_jax.types import Array


def check_operands(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    initial_state: Array | None,
    sequences: int | None = None,
) -> None:
    """Raise ShapeError unless the operands of one rule fit each other.

    ``sequences``: how many are packed into the one row, each with a state.
    """
    check_array(op, "q", q, [(n, None) for n in ("B", "T", "HK", "K")], FLOATS)
    B, T, HK, K = q.shape
    check_array(op, "k", k, [("B", B), ("T", T), ("HK", HK), ("K", K)], FLOATS)
    check_array(op, "v", v, [("B", B), ("T", T), ("HV", None), ("V", None)], FLOATS)
    HV, V = v.shape[2:]
    if 0 in (*q.shape, *v.shape):
        raise ShapeError(f"{op}: q has shape {q.shape}, v {v.shape}; needed no empty axis, T >= 1")
    if HV % HK:
        raise ShapeError(f"{op}: v has {HV} heads; needed a multiple of q's {HK}")
    for name, x in (("g", g), ("beta", beta)):
        check_array(op, name, x, [("B", B), ("T", T), ("HV", HV)], FLOATS)
    if initial_state is not None:
        first = ("B", B) if sequences is None else ("N", sequences)
        dims = [first, ("HV", HV), ("K", K), ("V", V)]
        check_array(op, "initial_state", initial_state, dims, [jnp.float32])


def as_float32(
    q: Array, k: Array, v: Array, g: Array, beta: Array, use_qk_l2norm: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """The operands in float32, q and k normalised with ``use_qk_l2norm``."""
    q, k, v, g, beta = (jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    return q, k, v, g, beta


def factor(scale: float | None, K: int) -> Array:
    """The factor of q: ``scale``, or ``K**-0.5``."""
    return jnp.asarray(K**-0.5 if scale is None else scale, jnp.float32)
