"""What this package can run on the present device."""

from typing import NamedTuple

import jax

from pallas_kernels import tuning

MIN_CAPABILITY = (8, 0)
"""The least compute capability of kernels without TMA and WGMMA."""
CHUNK_CAPABILITY = (9, 0)
"""The compute capability of those with: the kernels over chunks."""


def has_clusters() -> bool:
    """Whether the device has thread-block clusters; so it is assumed where there is no GPU."""
    return getattr(jax.devices()[0], "compute_capability", None) is None or capability() >= (9, 0)


def capability() -> tuple[int, ...]:
    """The compute capability of the device, which must be a CUDA GPU."""
    return tuple(map(int, str(jax.devices()[0].compute_capability).split(".")))


class Sizes(NamedTuple):
    """Sizes that decide what runs; None where nobody knows them."""

    K: int | None = None
    V: int | None = None
    W: int | None = None
    C: int | None = None
    tokens: int | None = None
    chunk: int | None = None


UNKNOWN = Sizes()


def unavailable_reason(sizes: Sizes = UNKNOWN) -> str | None:
    """Why no kernel runs here, in one sentence that says what would; None when they do."""
    why = _device_reason(sizes) or _size_reason(sizes)
    return why and f"{why}; backend='xla' runs it"


def _device_reason(sizes: Sizes) -> str | None:
    device = jax.devices()[0]
    if "cuda" not in device.client.platform_version.lower():
        return f"no CUDA GPU, the device is {device.platform}"
    if capability() < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        return f"compute capability {device.compute_capability}, the kernel needs {needed}"
    if sizes.chunk is not None and capability() != CHUNK_CAPABILITY:
        needed = ".".join(map(str, CHUNK_CAPABILITY))
        return f"compute capability {device.compute_capability}, kernels over chunks need {needed}"
    return None


def _size_reason(sizes: Sizes) -> str | None:
    K, V, W, C, tokens, chunk = sizes
    for name, size, legal in (
        ("K", K, tuning.HEAD_DIMS),
        ("V", V, tuning.HEAD_DIMS),
        ("W", W, tuning.CONV_WIDTHS),
    ):
        if size is not None and size not in legal:
            return f"{name} is {size}, the kernel needs {' or '.join(map(str, legal))}"
    if C is not None and C % tuning.CHANNELS:
        return f"C is {C}, the kernel needs a multiple of {tuning.CHANNELS}"
    if chunk is not None and chunk != tuning.CHUNK:
        return f"chunks of {chunk} tokens, the kernel needs {tuning.CHUNK}"
    if tokens is not None and tokens > tuning.MAX_TOKENS:
        return f"T is {tokens}, the kernel takes at most {tuning.MAX_TOKENS} tokens"
    return None
