"""What the device's memory gives at best, in the same run."""

import jax
import jax.numpy as jnp

from gdn_jax.bench.slope import Timing, blocking, slope
from gdn_jax.bench.subject import on_gpu, poisoned

_GPU_BYTES, _CPU_BYTES = 4 << 30, 64 << 20


def _increment(x: jax.Array) -> jax.Array:
    return x + 1


@jax.jit
def _wrong(x: jax.Array) -> jax.Array:
    return jnp.count_nonzero(x != 1)


def copy(repetitions: int) -> tuple[int, Timing, int]:
    """``x + 1`` in place: bytes read and written, the time, and the number of wrong elements."""
    moved = _GPU_BYTES if on_gpu() else _CPU_BYTES
    run = jax.jit(_increment, donate_argnums=0)
    x = run(jnp.zeros(moved // 8, jnp.float32))
    count = int(_wrong(x))
    return moved, slope(run, x, repetitions=repetitions), count


def copy_blocking(repetitions: int) -> tuple[int, Timing, int]:
    """As :func:`copy`, of twice the bytes, into another array, and each call waited for."""
    moved = 2 * (_GPU_BYTES if on_gpu() else _CPU_BYTES)
    run = jax.jit(_increment)
    x = poisoned(run, jnp.zeros(moved // 8, jnp.float32))
    count = int(_wrong(x))
    return moved, blocking(run, x, repetitions=repetitions), count
