"""Whether something fits into the device's memory, and what to tell a person if it does not."""

import contextlib
import os
from collections.abc import Iterator, Mapping

import jax

from gdn_jax.errors import DeviceMemoryError


def free_bytes() -> int | None:
    """Free bytes of the default device; on a CPU all of the machine's memory; None if unknown."""
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


@contextlib.contextmanager
def explained(
    where: str, there: Mapping[str, int], new: Mapping[str, int], advice: str
) -> Iterator[None]:
    """Refuse at the start what cannot fit, and explain in one line an allocation that fails later.

    Args:
        where: the call, for the message.
        there: bytes that are on the device already, by what they are for.
        new: bytes that the block allocates, by what they are for.
        advice: what to try.

    Raises:
        DeviceMemoryError: before anything runs, or instead of JAX's own error.
    """
    check_fits(f"{where}, {' and '.join(new)}", sum(new.values()), advice)
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        parts = " + ".join(f"{n / 1e9:.2f} GB of {what}" for what, n in {**there, **new}.items())
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        found = "" if limit is None else f", the device has {limit / 1e9:.2f} GB"
        message = f"{where}: out of device memory: needed {parts} and room to compute"
        raise DeviceMemoryError(f"{message}{found}; try {advice}") from error


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
