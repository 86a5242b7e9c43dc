"""The streaming kernel: it reads int32 words and adds them up, to measure what reading costs.

A CTA of 128 threads reads some rows of 512 words, 16 bytes a thread of each row. It requests all of
them before it uses the first, and writes their sum modulo ``2**32``. These are the loads of the
int4 kernel for one row of x, with the least work that keeps a compiler from leaving any load out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.jobs import Job, launch
from pallas_kernels.mosaic.layouts import load

ROW = 512
"""int32 words that the threads of a CTA read at once, four each."""


def unavailable_reason(words: int) -> str | None:
    """Why the kernel cannot read so many words; None when it can."""
    if words > 0 and words % ROW == 0:
        return None
    return f"{words} words; the streaming kernel needs a multiple of {ROW}"


@functools.partial(jax.jit, static_argnames="interpret")
def sums(w: jax.Array, *, after: jax.Array | None = None, interpret: Any = None) -> jax.Array:
    """``out[i]``, the sum of every word that CTA i read: int32 [CTAs].

    Args:
        w: int32 of any shape, a multiple of 512 words; CTAs take equal shares of it in order.
        after: an array that is not read, so that this call runs after the one that makes it.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.

    Raises:
        ValueError: another type or size.
    """
    if w.dtype != jnp.int32:
        raise ValueError(f"w is {w.dtype}; it must be int32")
    if reason := unavailable_reason(w.size):
        raise ValueError(reason)
    rows = tuning.stream_rows(w.size // ROW)
    ctas = w.size // (rows * ROW)
    layout = plgpu.Layout.WG_STRIDED((rows, ROW), vec_size=4)

    def body(index: Any, w: Any, out: Any) -> None:
        out[index] = jnp.sum(load(w.at[index], layout))

    work = Job(
        ctas=ctas,
        operands=(w.reshape(ctas, rows, ROW),),
        outs=(jax.ShapeDtypeStruct((ctas,), jnp.int32),),
        body=body,
    )
    ((out,),) = launch([work], name="stream", after=after, interpret=interpret)
    return out
