"""The operators of flash-linear-attention, in its argument order."""

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax import steps
from gdn_jax.backend import select_backend
from gdn_jax.checks import FLOATS, check_array
from gdn_jax.errors import ShapeError
from gdn_jax.types import Array, History, Recurrent
from pallas_kernels.conv import causal_conv
from pallas_kernels.delta_rule import delta_rule_decode


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
    K, out_dtype = k.shape[-1], v.dtype
    chosen = select_backend(op, backend=backend, K=K, V=V, tokens=T)
    if initial_state is None:
        initial_state = jnp.zeros((B, HV, K, V), jnp.float32)
    q, k, v, g, beta = (jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = steps.l2_normalise(q), steps.l2_normalise(k)
    factor = jnp.asarray(K**-0.5 if scale is None else scale, jnp.float32)
    run = _pallas if chosen == "pallas" else _xla
    with jax.named_scope(op):
        o, S = run(q, k, v, g, beta, factor, jnp.asarray(initial_state))
    return o.astype(out_dtype), S


def _xla(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: Array, S: Recurrent
) -> tuple[Array, Recurrent]:
    def body(S: Recurrent, token: tuple[Array, ...]) -> tuple[Recurrent, Array]:
        q, k, v, g, beta = token
        o, S = steps.delta_rule(q, k, v, g, beta, S)
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
    op: str, q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None
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
        dims = [("B", B), ("HV", HV), ("K", K), ("V", V)]
        check_array(op, "initial_state", initial_state, dims, [jnp.float32])


def causal_conv1d(
    x: Array, hist: History, weight: Array, *, backend: str | None = None
) -> tuple[Array, History]:
    """Depthwise causal convolution and SiLU over T tokens, from and to a history.

    ``out[t, c] = silu(sum_j weight[c, j] · ext[t + j, c])`` with ``ext = [hist; x]``; the new
    history is the last W-1 frames of ``ext``, so T < W-1 shifts it.

    Args:
        x: [B, T, C] float32, the convolution's input, T >= 1.
        hist: [B, W-1, C] float32, oldest first.
        weight: [C, W] float32; tap j multiplies window entry j, oldest first.
        backend: None takes pallas on a CUDA GPU for W of 2 to 4 and C a multiple of 64, else xla; a
            name runs or raises. Under differentiation both run the equations of xla.

    Returns:
        out [B, T, C] and hist [B, W-1, C], float32.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype, or T = 0.
        BackendUnavailableError: the named backend cannot run here.
    """
    op = "causal_conv1d"
    check_array(op, "weight", weight, [("C", None), ("W", None)], [jnp.float32])
    C, W = weight.shape
    check_array(op, "x", x, [("B", None), ("T", None), ("C", C)], [jnp.float32])
    B, T, _ = x.shape
    if T == 0:
        raise ShapeError(f"{op}: x has shape {x.shape}; needed at least one token, T >= 1")
    check_array(op, "hist", hist, [("B", B), ("W-1", W - 1), ("C", C)], [jnp.float32])
    run = _conv_pallas if select_backend(op, backend=backend, W=W, C=C) == "pallas" else _conv_xla
    with jax.named_scope(op):
        return run(jnp.asarray(x), jnp.asarray(hist), jnp.asarray(weight))


def _conv_xla(x: Array, hist: History, weight: Array) -> tuple[Array, History]:
    T, W = x.shape[1], weight.shape[1]
    ext = jnp.concatenate([hist, x], axis=1)
    windows = jnp.stack([ext[:, j : j + T] for j in range(W)], axis=-1)
    return jax.nn.silu(jnp.sum(windows * weight[None, None], axis=-1)), ext[:, T:]


@jax.custom_jvp
def _conv_pallas(x: Array, hist: History, weight: Array) -> tuple[Array, History]:
    return causal_conv(x, hist, weight)


@_conv_pallas.defjvp
def _conv_pallas_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]):
    return jax.jvp(_conv_xla, primals, tangents)
