"""What the device's memory gives at best, in the same run."""

import jax
import jax.numpy as jnp

from gdn_jax.bench.slope import Timing, slope
from gdn_jax.bench.subject import on_gpu

_GPU_BYTES, _CPU_BYTES = 4 << 30, 64 << 20


def copy(repetitions: int) -> tuple[int, Timing, int]:
    """``x + 1`` in place: bytes read and written, the time, and the number of wrong elements."""
    moved = _GPU_BYTES if on_gpu() else _CPU_BYTES
    run = jax.jit(lambda x: x + 1, donate_argnums=0)
    wrong = jax.jit(lambda x: jnp.count_nonzero(x != 1))
    x = run(jnp.zeros(moved // 8, jnp.float32))
    count = int(wrong(x))
    return moved, slope(run, x, repetitions=repetitions), count
