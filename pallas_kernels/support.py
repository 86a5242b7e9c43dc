"""What this package can run on the present device."""

import jax

from pallas_kernels import tuning

KERNELS = frozenset(
    {"decode_step", "decode", "trace_step", "recurrent_gated_delta_rule", "q4_matmul"}
)
"""Operators that have a kernel."""

MIN_CAPABILITY = (8, 0)
"""The least compute capability: nothing here needs TMA or WGMMA."""


def has_clusters() -> bool:
    """Whether the device has thread-block clusters; so it is assumed where there is no GPU."""
    return getattr(jax.devices()[0], "compute_capability", None) is None or _capability() >= (9, 0)


def _capability() -> tuple[int, ...]:
    return tuple(map(int, str(jax.devices()[0].compute_capability).split(".")))


def unavailable_reason(
    op: str,
    *,
    K: int | None = None,
    V: int | None = None,
    W: int | None = None,
    tokens: int | None = None,
) -> str | None:
    """Why no kernel runs ``op`` here, in one sentence that says what would; None when one does.

    Sizes left out are not asked about.
    """
    why = _why_not(op, K, V, W, tokens)
    return why and f"{why}; backend='xla' runs it"


def _why_not(
    op: str, K: int | None, V: int | None, W: int | None, tokens: int | None
) -> str | None:
    if op not in KERNELS:
        return f"there is no Pallas kernel for {op} in this version"
    device = jax.devices()[0]
    if "cuda" not in device.client.platform_version.lower():
        return f"no CUDA GPU, the device is {device.platform}"
    if _capability() < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        return f"compute capability {device.compute_capability}, the kernel needs {needed}"
    for name, size in (("K", K), ("V", V)):
        if size is not None and size not in tuning.HEAD_DIMS:
            return f"{name} is {size}, the kernel needs {' or '.join(map(str, tuning.HEAD_DIMS))}"
    if W is not None and W not in tuning.CONV_WIDTHS:
        return f"W is {W}, the kernel needs 2, 3 or 4"
    if tokens is not None and tokens > tuning.MAX_TOKENS:
        return f"T is {tokens}, the kernel takes at most {tuning.MAX_TOKENS} tokens"
    return None
