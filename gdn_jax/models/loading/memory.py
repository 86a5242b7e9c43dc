"""Whether something fits the device's memory, asked before it is made."""

import os

import jax

from gdn_jax.errors import DeviceMemoryError


def free_bytes() -> int | None:
    """Bytes free on the default device, on a CPU all of the machine's memory; None if unknown."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def peak_bytes() -> int | None:
    """The most bytes that the default device has held for this process; None if unknown."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def check_fits(what: str, needed: int, advice: str) -> None:
    """Raise DeviceMemoryError unless ``needed`` bytes are free on the default device."""
    free = free_bytes()
    if free is not None and needed > free:
        device = jax.devices()[0]
        if device.platform == "gpu":
            advice += ", or XLA_PYTHON_CLIENT_MEM_FRACTION=.95 for more than JAX's share of 0.75"
        raise DeviceMemoryError(
            f"{what}: needed {_size(needed)} on the device, {device.device_kind} has "
            f"{_size(free)} free; try {advice}"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
