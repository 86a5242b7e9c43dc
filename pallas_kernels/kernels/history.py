"""The causal convolution's sum over old frames, which runs beside the projections.

It does not need the new frame. Value heads share the channels of q and k, so several CTAs of the
middle kernel use one channel, and none of them may move its history while another still reads it.
Here each channel belongs to one CTA: it reads the W-1 frames, sums their share of the convolution,
and moves them one frame back. The middle kernel adds the new frame's share and writes that frame;
it reads no history at all.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import tuning
from pallas_kernels.jobs import Job
from pallas_kernels.mosaic.layouts import channels, load, taps_of
from pallas_kernels.place import Place, Row
from pallas_kernels.support import size_reason


def unavailable_reason(W: int | None) -> str | None:
    """Why the kernel cannot take W taps; None when it can, or might."""
    return size_reason("W", W, tuning.CONV_WIDTHS)


def job(hist: Any, weight: jax.Array, place: Place, B: int) -> Job:
    """``pre[b, c] = sum_{j < W-1} weight[c, j] · hist[j, c]``, and ``hist[j] <- hist[j + 1]``.

    Frame W-2 keeps its value. An idle row reads and writes no history.

    Args:
        hist: a reference to float32 [L, N, W-1, C], C a multiple of 64.
        weight: float32 [C, W], the taps, oldest first.
        place: where the rows' frames are read, and where they are written after the move.
        B: rows.

    Returns:
        A job whose outputs are ``pre``, float32 [B, C], and ``newest``, float32 [C]: the taps
        ``weight[:, W-1]`` side by side, as the middle kernel can load them.
    """
    C, W = weight.shape
    width = 128 if C % 128 == 0 else 64
    pieces = tuning.history_pieces(C, width)
    return Job(
        ctas=B * (C // (pieces * width)),
        operands=(hist, weight, *place.operands),
        outs=tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, C), (C,))),
        body=functools.partial(_body, W, width, pieces, C // (pieces * width)),
    )


def _body(W: int, width: int, pieces: int, ctas: int, index: Any, *refs: Any) -> None:
    hist, weight, *place, pre, newest = refs
    b, first = lax.div(index, ctas), lax.rem(index, ctas) * pieces
    parts = [pl.ds((first + n) * width, width) for n in range(pieces)]
    layout = channels(width)
    row = Row.of(tuple(place), b)
    taps = [taps_of(weight.at[part], width) for part in parts]  # W of [width] for each part

    def write_newest_taps() -> None:
        for part, mine in zip(parts, taps, strict=True):
            newest[part] = mine[-1]

    def shift() -> None:
        # All loads before the first store: a CTA has little else to do than to wait for them.
        frames = [
            [load(hist.at[row.layer, row.source, j, part], layout) for j in range(W - 1)]
            for part in parts
        ]
        for part, mine, olds in zip(parts, taps, frames, strict=True):
            terms = [frame * tap for frame, tap in zip(olds, mine, strict=False)]
            pre[b, part] = functools.reduce(jnp.add, terms)
            for j, frame in enumerate(olds[1:]):
                hist[row.layer, row.target, j, part] = frame

    pl.when(b == 0)(write_newest_taps)
    row.when_active(shift)
