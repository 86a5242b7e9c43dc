"""One Gated DeltaNet layer: the only place where the seven steps are composed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from gdn_jax._core.backend import select_backend
from gdn_jax._core.checks import FLOATS, check_array
from gdn_jax._core.varying import varying_like
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError, UnknownNameError
from gdn_jax.layer import steps
from gdn_jax.layer.pallas import KernelLayer, backend_for
from gdn_jax.layer.params import LARGE, GDNParams, check_params
from gdn_jax.layer.state import GDNState, check_state
from gdn_jax.layer.trace import Trace
from gdn_jax.ops.chunk import chunk_rule
from gdn_jax.ops.chunk_xla import CHUNK_SIZES
from gdn_jax.quant.project import Rounded
from gdn_jax.types import Array

PRECISIONS = ("float32", "bfloat16")
Step = Callable[[GDNState, Array], tuple[Array, GDNState, Any]]
"""One token: its output, the new state, and every operator's result or None."""


def forward(
    params: GDNParams, state: GDNState, x: Array, cfg: GDNConfig
) -> tuple[Array, GDNState, dict[str, Array]]:
    """The seven steps of one token, unchecked: y in the dtype of x, state, a trace's entries."""
    xc, z, b, a, beta, g = steps.input_projections(params, steps.cast(x, jnp.float32))
    xcv, hist = steps.causal_conv(xc, state.conv_hist, params.conv_weight)
    q, k, v = steps.split_heads(xcv, cfg)
    q, k = steps.normalise_qk(q, k)
    on, S = steps.delta_rule(q, k, v, g, beta, state.S)
    onn = steps.gated_rms_norm(on, z, params.norm_weight, cfg.norm_eps)
    out = steps.output_projection(onn, params.out_proj)
    seen = dict(XC=xc, Z=z, B=b, A=a, BETA=beta, G=g, XCV=xcv)
    seen |= dict(Q=q, K=k, ON=on, ONN=onn, OUT=out, S=S, HIST=hist)
    return steps.cast(out, x.dtype), GDNState(S, hist), seen


def decode_step(
    params: GDNParams, state: GDNState, x: Array, cfg: GDNConfig, *, backend: str | None = None
) -> tuple[Array, GDNState]:
    """One token of one layer: x [B, D] -> y [B, D] in the dtype of x, and the new state.

    The seven steps of :mod:`gdn_jax.layer.steps`, in float32 throughout: x is widened first and y
    is rounded once, last. Pure: the given state is untouched. No row depends on what another
    holds.

    Args:
        params: the layer's weights.
        state: S [B, HV, K, V] and conv_hist [B, W-1, C], float32.
        x: input after the block's norm, float32, bfloat16 or float16.
        cfg: the layer's sizes, static.
        backend: None takes pallas if :func:`gdn_jax.select_backend` gives it, the kernels can read
            the weights and no int4 weight has to be laid out for them first (see
            :func:`gdn_jax.params_to_kernel`), else xla; a named one runs or raises.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype.
        BackendUnavailableError: the named backend cannot run here.
    """
    if checked_backend("decode_step", params, state, x, cfg, backend) == "pallas":
        y, state, _ = kernel_step(KernelLayer(params, cfg), state, x)
    else:
        y, state, _ = forward(params, state, x, cfg)
    return y, state


def trace_step(
    params: GDNParams, state: GDNState, x: Array, cfg: GDNConfig, *, backend: str | None = None
) -> tuple[Array, GDNState, Trace]:
    """:func:`decode_step` with every operator's result; y and the state are bit-identical to it.

    The trace is float32 whatever the dtype of x: y is its OUT, rounded to that dtype. On pallas
    the same kernels run, and also store what they hold in registers.
    """
    if checked_backend("trace_step", params, state, x, cfg, backend) == "pallas":
        y, state, trace = kernel_step(KernelLayer(params, cfg), state, x, trace=True)
        assert trace is not None
        return y, state, trace
    y, state, seen = forward(params, state, x, cfg)
    return y, state, Trace(seen)


def decode(
    params: GDNParams, state: GDNState, xs: Array, cfg: GDNConfig, *, backend: str | None = None
) -> tuple[Array, GDNState]:
    """T tokens of one layer in one device run: xs [B, T, D] -> ys [B, T, D] and the new state.

    One ``lax.scan`` over tokens with the state carried on the device; equal to T calls of
    :func:`decode_step`. Arguments and errors are the same; T must be at least 1.

    Like every function here it may be mapped by ``jax.shard_map``, over sequences and over heads.
    Over heads, ``cfg`` counts the heads of one device, which has their rows of every weight (those
    of qkv and of the convolution again in the order q, k, v) and their columns of ``out_proj``; ys
    are then partial sums, which the caller adds up with ``lax.psum``.
    """
    chosen = checked_backend("decode", params, state, xs, cfg, backend, many=True)
    state = varying_like(state, params, xs)
    if chosen == "pallas":
        kernels = KernelLayer(params, cfg)
        return scan_tokens(lambda state, x: kernel_step(kernels, state, x), state, xs)
    return scan_tokens(lambda state, x: forward(params, state, x, cfg), state, xs)


def prefill(
    params: GDNParams,
    state: GDNState,
    xs: Array,
    cfg: GDNConfig,
    *,
    lengths: Array | None = None,
    chunk_size: int = 64,
    precision: str = "float32",
    backend: str | None = None,
) -> tuple[Array, GDNState]:
    """T tokens of one layer as matrix products: xs [B, T, D] -> ys [B, T, D] and the new state.

    Equal to :func:`decode` up to the order of float32 sums; every projection is one product, and
    the delta rule runs over chunks (:func:`gdn_jax.chunk_gated_delta_rule`). It starts from any
    state, tokens may be split over calls anywhere, and ``decode`` can go on from its state.

    Args:
        params, state, cfg: as for :func:`decode_step`.
        xs: inputs after the block's norm, float32, bfloat16 or float16, computed in float32 and
            rounded once, last, to ys; T at least 1.
        lengths: int32 [B], 0 to T: how many of a row's tokens count, from the first; all T by
            default. The others are padding: whatever they hold, they neither decay nor write,
            their outputs are zero, and the history ends with the last inputs that count.
        chunk_size: 16, 32, 64 or 128.
        precision: "float32", or "bfloat16" to round the operands of the three large projections
            and of the rule to it; sums and the state stay float32.
        backend: of the rule, as for :func:`gdn_jax.chunk_gated_delta_rule`; projections and the
            convolution always run on XLA.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype, T = 0, another chunk size, or a
            length outside 0 to T (unless traced).
        UnknownNameError: no such precision.
        BackendUnavailableError: the named backend cannot run here.
    """
    op = "prefill"
    _check_operands(op, params, state, xs, cfg, many=True)
    if precision not in PRECISIONS:
        legal = ", ".join(PRECISIONS)
        raise UnknownNameError(f"{op}: no precision {precision!r}; there are {legal}")
    if chunk_size not in CHUNK_SIZES:
        legal = ", ".join(map(str, CHUNK_SIZES))
        raise ShapeError(f"{op}: chunk_size is {chunk_size!r}; needed one of {legal}")
    backend = select_backend(op, cfg, backend=backend, chunk=chunk_size)
    if lengths is not None:
        check_lengths(op, lengths, *xs.shape[:2])
    return prefill_tokens(
        params, state, xs, cfg, lengths, chunk_size, precision=precision, backend=backend
    )


def prefill_tokens(
    params: GDNParams,
    state: GDNState,
    xs: Array,
    cfg: GDNConfig,
    lengths: Array | None,
    chunk_size: int = 64,
    *,
    precision: str,
    backend: str,
) -> tuple[Array, GDNState]:
    """:func:`prefill`, unchecked."""
    narrow, dtype, xs = precision == "bfloat16", xs.dtype, steps.cast(xs, jnp.float32)
    keep = _counted(lengths, xs.shape[1])
    params, xs = _rounded(params) if narrow else params, keep(xs)
    xc, z, _, _, beta, g = steps.input_projections(params, xs)
    beta, g = keep(beta), keep(g)
    xcv, hist = steps.causal_conv_tokens(xc, state.conv_hist, params.conv_weight, lengths)
    q, k, v = steps.split_heads(xcv, cfg)
    q, k = steps.normalise_qk(q, k)
    if narrow:
        q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    one = jnp.float32(1)
    on, S = chunk_rule(q, k, v, g, beta, one, state.S, chunk_size=chunk_size, backend=backend)
    onn = steps.gated_rms_norm(on.astype(jnp.float32), z, params.norm_weight, cfg.norm_eps)
    ys = steps.output_projection(onn, params.out_proj)
    return steps.cast(keep(ys), dtype), GDNState(S, hist)


def _counted(lengths: Array | None, T: int) -> Callable[[Array], Array]:
    """A function that zeros the tokens of [B, T, ..] that do not count; with None all count."""
    if lengths is None:
        return lambda x: x
    counts = jnp.arange(T)[None] < jnp.asarray(lengths)[:, None]
    return lambda x: jnp.where(counts[..., None], x, 0)


def _rounded(params: GDNParams) -> GDNParams:
    """The large projections as products of bfloat16."""
    large = {name: Rounded(getattr(params, name)) for name in LARGE}
    return dataclasses.replace(params, **large)


def scan_tokens(step: Step, state: GDNState, xs: Array) -> tuple[Array, GDNState]:
    """``step`` for every token of xs [B, T, D], the state carried on the device."""

    def body(state: GDNState, x: Array) -> tuple[GDNState, Array]:
        y, state, _ = step(state, x)
        return state, y

    with jax.named_scope("decode"):
        state, ys = lax.scan(body, state, jnp.swapaxes(xs, 0, 1))
    return jnp.swapaxes(ys, 0, 1), state


def kernel_step(
    kernels: KernelLayer, state: GDNState, x: Array, *, trace: bool = False
) -> tuple[Array, GDNState, Trace | None]:
    """One token of one layer on the kernels, which take it as a stack of one."""
    stack = jax.tree.map(lambda x: x[None], state)
    y, stack, seen = kernels.step(stack, 0, x, trace=trace)
    return y, jax.tree.map(lambda x: x[0], stack), seen


def check_lengths(op: str, lengths: Array, B: int, T: int) -> None:
    """Raise ShapeError unless lengths are int32 [B], 0 to T; values are checked unless traced."""
    check_array(op, "lengths", lengths, [("B", B)], [jnp.int32])
    if not isinstance(lengths, Tracer):
        found = np.asarray(lengths)
        if not ((found >= 0) & (found <= T)).all():
            raise ShapeError(f"{op}: lengths are {found}; needed 0 to {T}")


def checked_backend(
    op: str,
    params: GDNParams,
    state: GDNState,
    x: Array | np.ndarray,
    cfg: GDNConfig,
    backend: str | None,
    *,
    many: bool = False,
) -> str:
    """The backend to use, after checking that weights, state and inputs fit ``cfg``."""
    _check_operands(op, params, state, x, cfg, many=many)
    return backend_for(op, params, cfg, backend)


def _check_operands(
    op: str,
    params: GDNParams,
    state: GDNState,
    x: Array | np.ndarray,
    cfg: GDNConfig,
    *,
    many: bool,
) -> None:
    check_params(op, params, cfg)
    check_state(op, state, cfg)
    check_tokens(op, x, cfg, state.S.shape[0], many=many)


def check_tokens(
    op: str, x: Array | np.ndarray, cfg: GDNConfig, B: int | None = None, *, many: bool = False
) -> None:
    """Raise ShapeError unless ``x`` is [B, D], or with ``many`` xs [B, T, D], T at least 1."""
    rows, D = ("B", B), ("D", cfg.d_model)
    name, dims = ("xs", [rows, ("T", None), D]) if many else ("x", [rows, D])
    check_array(op, name, x, dims, FLOATS)
    if many and x.shape[1] == 0:
        raise ShapeError(f"{op}: xs has shape {x.shape}; needed at least one token, T >= 1")
