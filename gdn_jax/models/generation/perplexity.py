"""How well a model predicts a text."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.errors import TextError
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.forward import forward_by_block
from gdn_jax.models.generation.device import padded, reach_of
from gdn_jax.models.model import Model
from gdn_jax.models.route import Call
from gdn_jax.types import Array

CHUNK = 256
"""Tokens whose logits are held at once: 254 MB for a vocabulary of 248 320."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """``nll`` is the mean of ``-log p`` over ``tokens`` predicted tokens, in nats."""

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return math.exp(self.nll) if self.nll < 700 else math.inf


def measure(
    model: Model,
    tokens: Sequence[int] | np.ndarray,
    *,
    context: int | None = None,
    stride: int | None = None,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The mean negative log-likelihood of every token but the first, given all those before it.

    ``-log softmax(logits[t])[token t + 1]`` in float32, summed in float64. ``chunk`` tokens run at
    once and the cache is carried from chunk to chunk, so without ``context`` the text is one
    sequence: nothing is cut off, and the size of a chunk changes only the order of sums. The device
    then holds the keys and values of the whole text, and the logits of one chunk.

    With a ``context`` shorter than the text, a new window of that many tokens begins every
    ``stride`` tokens, by default half of ``context``. Every token is predicted once, after at least
    ``context - stride`` others, or in the first window after all those before it.

    Args:
        model: any weights.
        tokens: ids of the text, at least two.
        context: tokens of a window; all by default.
        stride: at least 1 and less than ``context``, so that a window has a token to begin with.
        chunk: tokens that run at once.
        progress: called as ``progress(done, total)`` after each chunk, in tokens run.

    Raises:
        TextError: fewer than two tokens, ids beyond the vocabulary, or ``context``, ``stride`` or
            ``chunk`` out of range.
    """
    ids = np.asarray(tokens, np.int32)
    vocab = model.cfg.vocab_size
    if ids.size < 2:
        raise TextError(f"perplexity: {ids.size} tokens; needed at least 2")
    if ids.min() < 0 or ids.max() >= vocab:
        raise TextError(f"perplexity: token {ids.max()} or {ids.min()}; needed 0 to {vocab - 1}")
    size = min(context or ids.size, ids.size)
    step = max(1, size // 2) if stride is None else stride
    if size < 2 or chunk < 1 or not 1 <= step < size:
        needed = "needed a context from 2 up, a shorter stride from 1 up, a chunk from 1 up"
        raise TextError(f"perplexity: context {context}, stride {stride}, chunk {chunk}; {needed}")
    spans = list(windows(ids.size, size, step))
    total, done, loss = sum(end - 1 - start for start, _, end in spans), 0, 0.0
    for start, first, end in spans:
        cache = ModelCache.zeros(model.cfg, 1, size, model.kv_dtype)
        for at in range(start, end - 1, chunk):
            stop = min(at + chunk, end - 1)
            piece, count = padded([ids[start : end - 1]], at - start, chunk)
            targets, _ = padded([ids[start + 1 : end]], at - start, chunk)
            reach, fresh = reach_of(at - start + chunk, size), at == start
            call = Call(model.cfg, model.route, reach=reach, fresh=fresh)
            logits, cache = forward_by_block(model.params, cache, piece, count, call)
            found = np.asarray(_losses(logits, targets), np.float64)
            loss += found[0, max(0, first - at - 1) : stop - at].sum()
            done += stop - at
            if progress:
                progress(done, total)
    return Perplexity(float(loss) / (ids.size - 1), int(ids.size) - 1)


def windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """``(start, first, end)``: tokens ``start`` to ``end - 1`` run, ``first`` on are predicted."""
    start, first, end = 0, 1, min(context, count)
    while True:
        yield start, first, end
        if end == count:
            return
        first, end = end, min(end + stride, count)
        start = end - context


@jax.jit
def _losses(logits: Array, targets: Array) -> Array:
    """``-log p`` [1, chunk] of the targets."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
