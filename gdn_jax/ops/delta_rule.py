"""The operators of flash-linear-attention, in its argument order."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from gdn_jax._core.backend import select_backend
from gdn_jax._core.checks import FLOATS, check_array
from gdn_jax.errors import ShapeError
from gdn_jax.ops import recurrence
from gdn_jax.ops.chunk_pallas import chunked_on_kernels, parts_for
from gdn_jax.ops.chunk_xla import CHUNK_SIZES, Packed, chunked
from gdn_jax.types import Array, Recurrent
from pallas_kernels.kernels.delta_rule import delta_rule_decode


def recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Recurrent | None = None,
    use_qk_l2norm: bool = False,
    backend: str | None = None,
) -> tuple[Array, Recurrent]:
    """The gated delta rule token by token: o [B, T, HV, V] in v's dtype, S f32 [B, HV, K, V].

    Per value head, with key head ``h // (HV // HK)``:
    ``S ← exp(g)·S``; ``S ← S + k⊗((v - Sᵀk)·beta)``; ``o = Sᵀ(scale·q)``.

    Args:
        q, k: [B, T, HK, K], float32, bfloat16 or float16; computed in float32.
        v: [B, T, HV, V], HV a multiple of HK.
        g: [B, T, HV], the log decay (0 keeps everything, never positive).
        beta: [B, T, HV], the writing strength, already through its sigmoid.
        scale: of q, applied once; K**-0.5 by default.
        initial_state: S float32 [B, HV, K, V]; zeros by default.
        use_qk_l2norm: first ``x · rsqrt(sum(x²) + 1e-6)`` on q and k.
        backend: None takes pallas on a CUDA GPU for K and V of 64 or 128 and T up to 4096, else
            xla; a name runs or raises. Under differentiation both run the equations of xla.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype, or T = 0.
        BackendUnavailableError: the named backend cannot run here.

    Source: Yang, Kautz, Hatamizadeh, arXiv:2412.06464; ``fused_recurrent_gated_delta_rule``.
    """
    op = "recurrent_gated_delta_rule"
    _check_operands(op, q, k, v, g, beta, initial_state)
    B, T, HV, V = v.shape
    K = k.shape[-1]
    chosen = select_backend(op, backend=backend, K=K, V=V, tokens=T)
    if initial_state is None:
        initial_state = jnp.zeros((B, HV, K, V), jnp.float32)
    operands = _operands(q, k, v, g, beta, use_qk_l2norm)
    factor = _factor(scale, K)
    run = _pallas if chosen == "pallas" else _xla
    with jax.named_scope(op):
        o, S = run(*operands, factor, jnp.asarray(initial_state))
    return o.astype(v.dtype), S


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Recurrent | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
    cu_seqlens: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Recurrent]:
    """:func:`recurrent_gated_delta_rule` over chunks of tokens: o [B, T, HV, V], S [B, HV, K, V].

    The same equations as matrix products, see :mod:`gdn_jax.ops.chunk_xla`: equal up to the order
    of float32 sums, whatever the chunk. Differentiable, in memory linear in T: gradients of all
    operands take 9.3 KB a token and value head at K = V = 128 and chunks of 64, outputs alone 4 KB
    (XLA's temporaries on a CPU).

    Args:
        q, k, v, g, beta, scale, use_qk_l2norm: as there; T may be any number from 1 up.
        initial_state: S float32 [B, HV, K, V], with ``cu_seqlens`` [N, HV, K, V]; zeros by default.
        chunk_size: tokens of a chunk: 16, 32, 64 or 128.
        cu_seqlens: int32 [N + 1] for N sequences one after another, B = 1: sequence i has the
            tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. They do not see each other; an
            empty one keeps its state. Tokens behind the last one give zeros.
        backend: None takes pallas on a GPU of compute capability 9.0 for K and V of 64 or 128 and
            chunks of 64, else xla; a name runs or raises. On pallas bfloat16 q, k and v are
            multiplied as they are, and so is what is computed on the way, rounded to bfloat16;
            others as sums of three bfloat16, which have the accuracy of float32. Sums and the
            state are float32. Under differentiation both run the equations of xla.

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
    _check_operands(op, q, k, v, g, beta, initial_state, N)
    B, T, HV, V = v.shape
    K = k.shape[-1]
    chosen = select_backend(op, backend=backend, K=K, V=V, chunk=chunk_size)
    if initial_state is None:
        initial_state = jnp.zeros((B if N is None else N, HV, K, V), jnp.float32)
    dtype, parts = v.dtype, parts_for(q, k, v)
    q, k, v, g, beta = _operands(q, k, v, g, beta, use_qk_l2norm)
    with jax.named_scope(op):
        if chosen == "pallas":
            if parts == 1:
                q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
            cu_seqlens = None if cu_seqlens is None else jnp.asarray(cu_seqlens)
            factor, S = _factor(scale, K), jnp.asarray(initial_state)
            o, S = chunked_on_kernels(parts, q, k, v, g, beta, factor, S, cu_seqlens)
            return o.astype(dtype), S
        packed = None
        if cu_seqlens is not None:
            packed = Packed.of(jnp.asarray(cu_seqlens), T, chunk_size)
        q = q * _factor(scale, K)
        o, S = chunked(q, k, v, g, beta, jnp.asarray(initial_state), chunk_size, packed)
    return o.astype(dtype), S


def _operands(
    q: Array, k: Array, v: Array, g: Array, beta: Array, use_qk_l2norm: bool
) -> tuple[Array, Array, Array, Array, Array]:
    q, k, v, g, beta = (jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = recurrence.l2_normalise(q), recurrence.l2_normalise(k)
    return q, k, v, g, beta


def _factor(scale: float | None, K: int) -> Array:
    return jnp.asarray(K**-0.5 if scale is None else scale, jnp.float32)


def _check_cu_seqlens(op: str, q: Array, cu_seqlens: Array) -> int:
    """N."""
    check_array(op, "cu_seqlens", cu_seqlens, [("N+1", None)], [jnp.int32])
    if np.ndim(q) != 4 or q.shape[0] != 1 or cu_seqlens.shape[0] < 2:
        found = f"q has shape {np.shape(q)}, cu_seqlens {cu_seqlens.shape}"
        raise ShapeError(f"{op}: {found}; needed B = 1 and at least two places")
    if not isinstance(cu_seqlens, Tracer):
        at = np.asarray(cu_seqlens)
        if at[0] != 0 or at[-1] > q.shape[1] or (np.diff(at) < 0).any():
            found, T = f"cu_seqlens is {at}", q.shape[1]
            raise ShapeError(f"{op}: {found}; needed to begin at 0, never go down, end by {T}")
    return cu_seqlens.shape[0] - 1


def _xla(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: Array, S: Recurrent
) -> tuple[Array, Recurrent]:
    def body(S: Recurrent, token: tuple[Array, ...]) -> tuple[Recurrent, Array]:
        q, k, v, g, beta = token
        o, S = recurrence.delta_rule(q, k, v, g, beta, S)
        return S, o

    tokens = tuple(jnp.swapaxes(x, 0, 1) for x in (q * scale, k, v, g, beta))
    S, o = lax.scan(body, S, tokens)
    return jnp.swapaxes(o, 0, 1), S


@jax.custom_batching.custom_vmap
def _kernel(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: Array, S: Recurrent
) -> tuple[Array, Recurrent]:
    return delta_rule_decode(q, k, v, g, beta, scale, S)


@_kernel.def_vmap
def _more_rows(size: int, batched: list[bool], *operands: Array):
    """More rows of the same launch."""
    every = (
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip(operands, batched, strict=True)
    )
    q, k, v, g, beta, scale, S = every
    q = q * scale.reshape(size, *[1] * (q.ndim - 1))
    rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, g, beta))
    o, S = _kernel(*rows, jnp.float32(1), S.reshape(-1, *S.shape[2:]))
    return (o.reshape(size, -1, *o.shape[1:]), S.reshape(size, -1, *S.shape[1:])), (True, True)


@jax.custom_jvp
def _pallas(*operands: Array) -> tuple[Array, Recurrent]:
    return _kernel(*operands)


@_pallas.defjvp
def _pallas_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]):
    return jax.jvp(_xla, primals, tangents)


def _check_operands(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    initial_state: Array | None,
    sequences: int | None = None,
) -> None:
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
