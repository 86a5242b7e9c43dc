"""What this package can run on the device at hand."""

from collections.abc import Sequence

import jax

MIN_CAPABILITY = (8, 0)
"""The least compute capability for kernels without TMA and WGMMA."""
CHUNK_CAPABILITY = (9, 0)
"""The compute capability for kernels with TMA and WGMMA, which are those over chunks."""


def has_clusters() -> bool:
    """Whether the device has thread-block clusters; without a GPU it is assumed to."""
    return getattr(jax.devices()[0], "compute_capability", None) is None or capability() >= (9, 0)


def capability() -> tuple[int, ...]:
    """The compute capability of the device, which must be a CUDA GPU."""
    return tuple(map(int, str(jax.devices()[0].compute_capability).split(".")))


def device_reason(only: tuple[int, ...] | None = None) -> str | None:
    """Why no kernel can run on this device; None when kernels can.

    ``only``: the one compute capability that kernels with WGMMA are compiled for.
    """
    device = jax.devices()[0]
    if "cuda" not in device.client.platform_version.lower():
        return f"no CUDA GPU, the device is {device.platform}"
    if capability() < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        return f"compute capability {device.compute_capability}, the kernel needs {needed}"
    if only is not None and capability() != only:
        needed = ".".join(map(str, only))
        return f"compute capability {device.compute_capability}, kernels over chunks need {needed}"
    return None


def size_reason(name: str, size: int | None, legal: Sequence[int]) -> str | None:
    """Why a kernel written for ``legal`` sizes cannot take this one; None when it can, or might."""
    if size is None or size in legal:
        return None
    return f"{name} is {size}, the kernel needs {' or '.join(map(str, legal))}"
