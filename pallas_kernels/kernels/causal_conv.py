"""The causal convolution of many tokens in one launch.

Grid: one CTA for 64 or 128 channels of one row and a run of up to 16 tokens, one channel a thread.
A run begins with the W-1 frames before it, from the history or from x, and slides its window in
registers; the last one leaves the new history.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.jobs import Job, launch
from pallas_kernels.mosaic.layouts import as_computed, channels, load, silu, taps_of
from pallas_kernels.support import size_reason


def unavailable_reason(W: int | None, C: int | None) -> str | None:
    """Why the kernel cannot take W taps of C channels; None when it can, or might."""
    if C is not None and C % tuning.CHANNELS:
        return f"C is {C}, the kernel needs a multiple of {tuning.CHANNELS}"
    return size_reason("W", W, tuning.CONV_WIDTHS)


@functools.partial(jax.jit, static_argnames="interpret")
def causal_conv(
    x: jax.Array, hist: jax.Array, weight: jax.Array, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """``out[t] = silu(sum_j weight[:, j]·ext[t + j])``, ``ext = [hist; x]``, and its last frames.

    Args:
        x: float32 [B, T, C], C a multiple of 64.
        hist: float32 [B, W-1, C], oldest first.
        weight: float32 [C, W].
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.

    Returns:
        out [B, T, C] and the new history [B, W-1, C], float32.
    """
    (B, T, C), W = x.shape, weight.shape[1]
    width = 128 if C % 128 == 0 else 64
    pieces, runs = C // width, pl.cdiv(T, tuning.CONV_TOKENS)

    def body(index: Any, x: Any, hist: Any, weight: Any, out: Any, new: Any) -> None:
        index, run = lax.div(index, runs), lax.rem(index, runs)
        b, mine = lax.div(index, pieces), pl.ds(lax.rem(index, pieces) * width, width)
        layout, first = channels(width), run * tuning.CONV_TOKENS
        taps = taps_of(weight.at[mine], width)  # [width] each

        def before(j: int) -> jax.Array:
            """Frame j of those before the run, [width]."""
            t = first - (W - 1) + j
            old = load(hist.at[b, jnp.minimum(t + W - 1, W - 2), mine], layout)
            past = plgpu.layout_cast(jnp.broadcast_to(jnp.int32(t), (width,)), layout) < 0
            return jnp.where(past, old, load(x.at[b, jnp.maximum(t, 0), mine], layout))

        def token(t: Any, window: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            window = *window, as_computed(load(x.at[b, t, mine], layout))
            terms = [frame * tap for frame, tap in zip(window, taps, strict=True)]
            out[b, t, mine] = silu(functools.reduce(jnp.add, terms))
            return window[1:]

        start = tuple(before(j) for j in range(W - 1))
        window = lax.fori_loop(first, jnp.minimum(first + tuning.CONV_TOKENS, T), token, start)

        def write_history() -> None:
            for j, frame in enumerate(window):
                new[b, j, mine] = frame

        pl.when(run == runs - 1)(write_history)

    shapes = (x.shape, hist.shape)
    job = Job(
        ctas=B * pieces * runs,
        operands=(x, hist, weight),
        outs=tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes),
        body=body,
    )
    ((out, new),) = launch([job], name="causal_conv", interpret=interpret)
    return out, new
