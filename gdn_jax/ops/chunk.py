"""The gated delta rule over chunks of tokens, in the argument order of flash-linear-attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax._core.backend import select_backend
from gdn_jax._core.checks import check_array
from gdn_jax.errors import ShapeError
from gdn_jax.ops.chunk_pallas import chunked_on_kernels, parts_for
from gdn_jax.ops.chunk_xla import CHUNK_SIZES, Packed, chunked
from gdn_jax.ops.operands import as_float32, check_operands, factor
from gdn_jax.types import Array


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    cu_seqlens: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """The gated delta rule over chunks of tokens: o [B, T, HV, V], S [B, HV, K, V].

    The equations of :func:`gdn_jax.recurrent_gated_delta_rule` as matrix products, see
    :mod:`gdn_jax.ops.chunk_xla`: equal up to the order of float32 sums, whatever the chunk.
    Differentiable, with memory linear in T: at K = V = 128 and chunks of 64, gradients of all
    operands take 9.3 KB per token and value head, outputs alone 4 KB (XLA's temporaries on a CPU).

    Args:
        q, k, v, g, beta, scale, use_qk_l2norm: as for that function; T is any number from 1 up.
        initial_state: S float32 [B, HV, K, V], with ``cu_seqlens`` [N, HV, K, V]; zeros by default.
        chunk_size: tokens of a chunk: 16, 32, 64 or 128.
        cu_seqlens: int32 [N + 1] for N sequences one after another, B = 1: sequence i has the
            tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. No sequence affects another; an
            empty one keeps its state. Tokens after the last sequence give zeros.
        backend: None takes pallas on a GPU of compute capability 9.0 for K and V of 64 or 128 and
            chunks of 64, else xla; a named one runs or raises. If q, k and v are all bfloat16,
            pallas multiplies them as they are and rounds intermediate operands to bfloat16;
            otherwise it multiplies sums of three bfloat16, which have the accuracy of float32.
            Sums and the state are float32. Under differentiation both run the equations of xla.

    Returns:
        o in v's dtype; S of each row, or of each sequence.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype, T = 0, another chunk size, or
            ``cu_seqlens`` that do not begin at 0, go down or end beyond T (unless traced).
        BackendUnavailableError: the named backend cannot run here.

    Source: Yang, Kautz, Hatamizadeh, arXiv:2412.06464; ``chunk_gated_delta_rule``.
    """
    op = "chunk_gated_delta_rule"
    if chunk_size not in CHUNK_SIZES:
        legal = ", ".join(map(str, CHUNK_SIZES))
        raise ShapeError(f"{op}: chunk_size is {chunk_size!r}; needed one of {legal}")
    N = None if cu_seqlens is None else _check_cu_seqlens(op, q, cu_seqlens)
    check_operands(op, q, k, v, g, beta, initial_state, N)
    B, K, (HV, V) = len(v), k.shape[-1], v.shape[2:]
    chosen = select_backend(op, backend=backend, K=K, V=V, chunk=chunk_size)
    if initial_state is None:
        initial_state = jnp.zeros((B if N is None else N, HV, K, V), jnp.float32)
    return chunk_rule(
        q,
        k,
        v,
        g,
        beta,
        factor(scale, K),
        jnp.asarray(initial_state),
        chunk_size=chunk_size,
        use_qk_l2norm=use_qk_l2norm,
        cu_seqlens=None if cu_seqlens is None else jnp.asarray(cu_seqlens),
        backend=chosen,
    )


def chunk_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: Array,
    S: Array,
    *,
    chunk_size: int,
    use_qk_l2norm: bool = False,
    cu_seqlens: Array | None = None,
    backend: str,
) -> tuple[Array, Array]:
    """:func:`chunk_gated_delta_rule`, unchecked, on a backend that can run it."""
    dtype, parts = v.dtype, parts_for(q, k, v)
    with jax.named_scope("chunk_gated_delta_rule"):
        q, k, v, g, beta = as_float32(q, k, v, g, beta, use_qk_l2norm)
        if backend == "pallas":
            if parts == 1:
                q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
            o, S = chunked_on_kernels(parts, q, k, v, g, beta, scale, S, cu_seqlens)
        else:
            packed = None if cu_seqlens is None else Packed.of(cu_seqlens, q.shape[1], chunk_size)
            o, S = chunked(q * scale, k, v, g, beta, S, chunk_size, packed)
    return o.astype(dtype), S


def _check_cu_seqlens(op: str, q: Array, cu_seqlens: Array) -> int:
    """Check ``cu_seqlens`` [N + 1] and return N."""
    check_array(op, "cu_seqlens", cu_seqlens, [("N+1", None)], [jnp.int32])
    if np.ndim(q) != 4 or q.shape[0] != 1 or cu_seqlens.shape[0] < 2:
        found = f"q has shape {np.shape(q)}, cu_seqlens {cu_seqlens.shape}"
        raise ShapeError(f"{op}: {found}; needed B = 1 and at least two entries")
    if not isinstance(cu_seqlens, Tracer):
        at = np.asarray(cu_seqlens)
        if at[0] != 0 or at[-1] > q.shape[1] or (np.diff(at) < 0).any():
            found, T = f"cu_seqlens is {at}", q.shape[1]
            raise ShapeError(f"{op}: {found}; needed to begin at 0, never go down, end by {T}")
    return cu_seqlens.shape[0] - 1
