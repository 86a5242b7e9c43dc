"""The ceilings: how fast the device copies memory and multiplies matrices, in the same run."""

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.bench.slope import Timing, blocking, slope
from gdn_jax.bench.workload import on_gpu, poisoned

_GPU_BYTES, _CPU_BYTES = 4 << 30, 64 << 20
_GPU_SIDE, _CPU_SIDE = 8192, 256


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
    """Like :func:`copy`, but of twice the bytes, into another array, and waiting for each call."""
    moved = 2 * (_GPU_BYTES if on_gpu() else _CPU_BYTES)
    run = jax.jit(_increment)
    x = poisoned(run, jnp.zeros(moved // 8, jnp.float32))
    count = int(_wrong(x))
    return moved, blocking(run, x, repetitions=repetitions), count


def matrix(repetitions: int) -> tuple[int, Timing, float]:
    """A square bfloat16 product: flops, the time, and the max_rel of every element to float32."""
    side = _GPU_SIDE if on_gpu() else _CPU_SIDE
    keys = jax.random.split(jax.random.key(0))
    x, w = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
    run = jax.jit(jnp.dot)
    apart = float(_apart(poisoned(run, x, w), x, w))
    return 2 * side**3, slope(lambda _: run(x, w), None, repetitions=repetitions), apart


@jax.jit
def _apart(y: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    exact = jnp.dot(*(a.astype(jnp.float32) for a in (x, w)), precision=lax.Precision.HIGHEST)
    return jnp.max(jnp.abs(y.astype(jnp.float32) - exact)) / jnp.max(jnp.abs(exact))
