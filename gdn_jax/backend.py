"""Which backend runs an operator, and why another cannot."""

import pallas_kernels.support
from gdn_jax.config import GDNConfig
from gdn_jax.errors import BackendUnavailableError, UnknownNameError

OPS = ("decode_step", "decode", "trace_step", "recurrent_gated_delta_rule", "q4_matmul")
BACKENDS = ("xla", "pallas")


def unavailable_reason(
    op: str,
    cfg: GDNConfig | None,
    backend: str,
    *,
    K: int | None = None,
    V: int | None = None,
    tokens: int | None = None,
) -> str | None:
    """Why ``backend`` cannot run ``op`` at this shape on this device; None when it can.

    Sizes that neither ``cfg`` nor a keyword gives are not asked about.
    """
    if op not in OPS:
        raise UnknownNameError(f"no operator {op!r}; there are {', '.join(OPS)}")
    if backend not in BACKENDS:
        raise UnknownNameError(f"no backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "xla":
        return None
    W = None
    if cfg is not None:
        K, V, W = cfg.head_k_dim, cfg.head_v_dim, cfg.conv_width
    return pallas_kernels.support.unavailable_reason(op, K=K, V=V, W=W, tokens=tokens)


def select_backend(
    op: str,
    cfg: GDNConfig | None = None,
    *,
    backend: str | None = None,
    K: int | None = None,
    V: int | None = None,
    tokens: int | None = None,
) -> str:
    """The backend that runs ``op``: the named one, or the first available of pallas and xla.

    Args:
        op: one of :data:`OPS`.
        cfg: the layer's sizes, where the operator has them.
        backend: a name to insist on; never replaced by another.
        K, V: widths of a key and of a value head, for an operator without ``cfg``.
        tokens: T, where the operator takes many.

    Raises:
        UnknownNameError: no such operator or backend.
        BackendUnavailableError: the named backend cannot run it here, with the reason.
    """
    if backend is None:
        reason = unavailable_reason(op, cfg, "pallas", K=K, V=V, tokens=tokens)
        return "xla" if reason else "pallas"
    reason = unavailable_reason(op, cfg, backend, K=K, V=V, tokens=tokens)
    if reason:
        raise BackendUnavailableError(f"{op} on backend {backend!r}: {reason}")
    return backend
