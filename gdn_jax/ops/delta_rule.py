"""The gated delta rule token by token, in the argument order of flash-linear-attention."""

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax._core.backend import select_backend
from gdn_jax._core.varying import varying_like
from gdn_jax.ops import recurrence
from gdn_jax.ops.operands import as_float32, check_operands, factor
from gdn_jax.types import Array
from pallas_kernels.kernels.delta_rule import delta_rule_decode


def recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    use_qk_l2norm: bool = False,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """The gated delta rule token by token: o [B, T, HV, V] in v's dtype, S f32 [B, HV, K, V].

    Per value head, with key head ``h // (HV // HK)``:
    ``S ← exp(g)·S``; ``S ← S + k⊗((v - Sᵀk)·beta)``; ``o = Sᵀ(scale·q)``.

    Args:
        q, k: [B, T, HK, K], float32, bfloat16 or float16; computed in float32.
        v: [B, T, HV, V], HV a multiple of HK.
        g: [B, T, HV], the log decay (0 keeps everything, never positive).
        beta: [B, T, HV], the writing strength, after its sigmoid.
        scale: the factor of q, applied once; K**-0.5 by default.
        initial_state: S float32 [B, HV, K, V]; zeros by default.
        use_qk_l2norm: first ``x · rsqrt(sum(x²) + 1e-6)`` on q and k.
        backend: None takes pallas on a CUDA GPU for K and V of 64 or 128 and T up to 4096, else
            xla; a named one runs or raises. Under differentiation both run the equations of xla.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype, or T = 0.
        BackendUnavailableError: the named backend cannot run here.

    Source: Yang, Kautz, Hatamizadeh, arXiv:2412.06464; ``fused_recurrent_gated_delta_rule``.
    """
    op = "recurrent_gated_delta_rule"
    check_operands(op, q, k, v, g, beta, initial_state)
    B, T, HV, V = v.shape
    K = k.shape[-1]
    chosen = select_backend(op, backend=backend, K=K, V=V, tokens=T)
    if initial_state is None:
        initial_state = jnp.zeros((B, HV, K, V), jnp.float32)
    operands = as_float32(q, k, v, g, beta, use_qk_l2norm)
    run = _pallas if chosen == "pallas" else _xla
    with jax.named_scope(op):
        o, S = run(*operands, factor(scale, K), jnp.asarray(initial_state))
    return o.astype(v.dtype), S


def _xla(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: Array, S: Array
) -> tuple[Array, Array]:
    def body(S: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = token
        o, S = recurrence.delta_rule(q, k, v, g, beta, S)
        return S, o

    tokens = tuple(jnp.swapaxes(x, 0, 1) for x in (q * scale, k, v, g, beta))
    S, o = lax.scan(body, varying_like(S, tokens), tokens)
    return jnp.swapaxes(o, 0, 1), S


@jax.custom_batching.custom_vmap
def _kernel(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: Array, S: Array
) -> tuple[Array, Array]:
    return delta_rule_decode(q, k, v, g, beta, scale, S)


@_kernel.def_vmap
def _more_rows(size: int, batched: list[bool], *operands: Array):
    """A mapped axis becomes more rows of one launch."""
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
def _pallas(*operands: Array) -> tuple[Array, Array]:
    return _kernel(*operands)


@_pallas.defjvp
def _pallas_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]):
    return jax.jvp(_xla, primals, tangents)
