"""Which backend runs an operator, and why another cannot."""

from gdn_jax.config import GDNConfig
from gdn_jax.errors import BackendUnavailableError, UnknownNameError
from pallas_kernels import support, tuning
from pallas_kernels.support import UNKNOWN, Sizes

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


def unavailable_reason(
    op: str, cfg: GDNConfig | None, backend: str, sizes: Sizes = UNKNOWN
) -> str | None:
    """Why ``backend`` cannot run ``op`` at this shape on this device; None when it can.

    Sizes that neither ``cfg`` nor ``sizes`` gives are not asked about.
    """
    if op not in OPS:
        raise UnknownNameError(f"no operator {op!r}; there are {', '.join(OPS)}")
    if backend not in BACKENDS:
        raise UnknownNameError(f"no backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "xla":
        return None
    if op in CHUNKED and sizes.chunk is None:
        sizes = sizes._replace(chunk=tuning.CHUNK)
    if cfg is not None:
        sizes = sizes._replace(K=cfg.head_k_dim, V=cfg.head_v_dim, W=cfg.conv_width)
    return support.unavailable_reason(sizes)


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
        cfg: the layer's sizes, where the operator has them.
        backend: a name to insist on; never replaced by another.
        K, V: widths of a key and of a value head, for an operator without ``cfg``.
        W, C: taps and channels of a convolution.
        tokens: T, where the operator takes many one after another.
        chunk: tokens of a chunk, where the operator takes chunks; 64 by default.

    Raises:
        UnknownNameError: no such operator or backend.
        BackendUnavailableError: the named backend cannot run it here, with the reason.
    """
    sizes = Sizes(K, V, W, C, tokens, chunk)
    if backend is None:
        return "xla" if unavailable_reason(op, cfg, "pallas", sizes) else "pallas"
    reason = unavailable_reason(op, cfg, backend, sizes)
    if reason:
        raise BackendUnavailableError(f"{op} on backend {backend!r}: {reason}")
    return backend
