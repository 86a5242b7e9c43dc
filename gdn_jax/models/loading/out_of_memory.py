"""What to tell a person whose device runs out of memory."""

import contextlib
from collections.abc import Iterator, Mapping

import jax

from gdn_jax.errors import DeviceMemoryError
from gdn_jax.models.loading.memory import check_fits


@contextlib.contextmanager
def explained(
    where: str, there: Mapping[str, int], new: Mapping[str, int], advice: str
) -> Iterator[None]:
    """Refuses what cannot fit, and turns an allocation that fails later into one line.

    Args:
        where: the call, for the message.
        there: bytes that are on the device already, by what they are for.
        new: bytes that will be.
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
