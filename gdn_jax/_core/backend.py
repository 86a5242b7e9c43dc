"""Which backend runs an operator, and why the other does not; every operator asks here."""

from collections.abc import Iterable
from typing import NamedTuple

from gdn_jax.config import GDNConfig
from gdn_jax.errors import BackendUnavailableError, UnknownNameError
from pallas_kernels import q4_layout, support
from pallas_kernels.kernels import (
    causal_conv,
    chunk_inside,
    chunk_through,
    delta_rule,
    float_gemv,
    history,
    middle,
)

OPS = (
    "decode_step",
    "decode",
    "trace_step",
    "recurrent_gated_delta_rule",
    "prefill",
    "chunk_gated_delta_rule",
    "causal_conv1d",
    "q4_matmul",
)
CHUNKED = ("prefill", "chunk_gated_delta_rule")
"""Operators over chunks of tokens."""
BACKENDS = ("xla", "pallas")


class Sizes(NamedTuple):
    """Sizes that decide which backend can run; None for one that is not known."""

    K: int | None = None
    V: int | None = None
    W: int | None = None
    C: int | None = None
    tokens: int | None = None
    chunk: int | None = None


UNKNOWN = Sizes()


class Matrix(NamedTuple):
    """What :func:`choose` needs to know of a weight [N, K]: its type, and if a kernel can read it.

    ``name`` is its name in messages; an ``int4`` weight is ``laid_out`` for the kernels or not.
    """

    name: str
    shape: tuple[int, ...]
    int4: bool = False
    laid_out: bool = True


class Choice(NamedTuple):
    """The backend that runs, and why it is not pallas when none was named."""

    backend: str
    reason: str | None = None


def choose(
    op: str,
    cfg: GDNConfig | None = None,
    *,
    sizes: Sizes = UNKNOWN,
    weights: Iterable[Matrix] = (),
    backend: str | None = None,
    lays_out: bool = True,
    obstacle: str | None = None,
) -> Choice:
    """The backend that runs ``op``: the named one, or pallas where its kernels can, else xla.

    When none is named, pallas also needs every int4 weight laid out already, because laying it
    out in each call costs more than the product. A size that neither ``cfg`` nor ``sizes`` gives
    is not checked.

    Args:
        op: one of :data:`OPS`.
        cfg: the layer's sizes, for an operator that takes them.
        sizes: those of an operator without ``cfg``.
        weights: what is multiplied with.
        backend: a name to insist on; never replaced by another.
        lays_out: whether ``op`` on a named backend lays int4 weights out itself.
        obstacle: a reason why the kernels cannot run it that sizes and weights do not show.

    Raises:
        UnknownNameError: no such operator or backend.
        BackendUnavailableError: the named backend cannot run it here, with the reason.
    """
    if op not in OPS:
        raise UnknownNameError(f"no operator {op!r}; there are {', '.join(OPS)}")
    if backend is not None and backend not in BACKENDS:
        raise UnknownNameError(f"no backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "xla":
        return Choice("xla")
    if cfg is not None:
        sizes = sizes._replace(K=cfg.head_k_dim, V=cfg.head_v_dim, W=cfg.conv_width)
    weights = tuple(weights)
    reason = device_reason(op) or _size_reason(op, sizes) or obstacle or _weight_reason(weights)
    if backend is None or not lays_out:
        reason = reason or _layout_reason(weights)
    if backend is None:
        return Choice("xla" if reason else "pallas", reason)
    if reason:
        raise BackendUnavailableError(
            f"{op} on backend {backend!r}: {reason}; backend='xla' runs it"
        )
    return Choice(backend)


def select_backend(
    op: str,
    cfg: GDNConfig | None = None,
    *,
    backend: str | None = None,
    K: int | None = None,
    V: int | None = None,
    W: int | None = None,
    C: int | None = None,
    tokens: int | None = None,
    chunk: int | None = None,
) -> str:
    """The backend that runs ``op``: the named one, or the first available of pallas and xla.

    Args:
        op: one of :data:`OPS`.
        cfg: the layer's sizes, for an operator that takes them.
        backend: a name to insist on; never replaced by another.
        K, V: widths of a key and of a value head, for an operator without ``cfg``.
        W, C: taps and channels of a convolution.
        tokens: T, for an operator that runs over tokens one after another.
        chunk: tokens of a chunk, for an operator over chunks; 64 by default.

    Raises:
        UnknownNameError: no such operator or backend.
        BackendUnavailableError: the named backend cannot run it here, with the reason.
    """
    return choose(op, cfg, sizes=Sizes(K, V, W, C, tokens, chunk), backend=backend).backend


def device_reason(op: str | None = None) -> str | None:
    """Why this device cannot run the kernels, or those of ``op``; None when it can."""
    return support.device_reason(support.CHUNK_CAPABILITY if op in CHUNKED else None)


def capability() -> tuple[int, ...]:
    """The compute capability of the device, which must be a CUDA GPU."""
    return support.capability()


def _size_reason(op: str, sizes: Sizes) -> str | None:
    K, V, W, C, tokens, chunk = sizes
    match op:
        case "recurrent_gated_delta_rule":
            return delta_rule.unavailable_reason(K, V, tokens)
        case "prefill" | "chunk_gated_delta_rule":
            return chunk_inside.unavailable_reason(K, chunk) or chunk_through.unavailable_reason(
                K, V
            )
        case "causal_conv1d":
            return causal_conv.unavailable_reason(W, C)
        case "q4_matmul":
            return None
        case _:
            return middle.unavailable_reason(K, V) or history.unavailable_reason(W)


def _weight_reason(weights: tuple[Matrix, ...]) -> str | None:
    for name, (N, K), int4, _ in weights:
        reason = (q4_layout if int4 else float_gemv).unavailable_reason(N, K)
        if reason:
            return f"{name}: {reason}"
    return None


def _layout_reason(weights: tuple[Matrix, ...]) -> str | None:
    for w in weights:
        if not w.laid_out:
            return f"{w.name}: int4 that is not laid out for the kernels (gdn_jax.params_to_kernel)"
    return None
