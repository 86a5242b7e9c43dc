"""From a model's tokens to logits: the only place where its blocks are composed."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from gdn_jax.layer.params import GDNParams
from gdn_jax.models.blocks import embed, full_block, head, linear_block
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.params import ModelParams
from gdn_jax.models.residual import Stream, whole
from gdn_jax.models.route import Call
from gdn_jax.types import Array


def forward(
    params: ModelParams, cache: ModelCache, tokens: Array, lengths: Array | None, call: Call
) -> tuple[Array, ModelCache]:
    """Logits of tokens that follow those in the cache, and the cache with these tokens added.

    One token a row is a decode step, more are a prefill. The residual stream, the states and the
    logits are float32; weights keep their dtype. The function is traceable: jit it with ``call``
    static, and donate the cache to have it updated in place. A token beyond the cache's room is
    lost without an error: see :func:`gdn_jax.models.cache.check_room`.

    Args:
        params: the weights; on the route ``"pallas"`` as :func:`gdn_jax.models.kernels.lay_out`
            returns them.
        cache: what these rows carry, with room for the new tokens.
        tokens: int32 [B, T].
        lengths: int32 [B]: how many tokens of a row count. Those after them are padding, and a row
            of length 0 is idle: it reads and writes nothing. None: all T count.
        call: static.

    Returns:
        float32 [B, T, vocab], meaningless at padding, or [B, vocab] where ``call.logits`` is
        ``"last"``; and the new cache.
    """
    x, cache = _blocks(_traced, params, cache, tokens, lengths, call)
    return _logits(_traced, params, x, lengths, call), cache


def forward_by_block(
    params: ModelParams,
    cache: ModelCache,
    tokens: Array,
    lengths: Array | None,
    call: Call,
    *,
    tuned: bool = True,
) -> tuple[Array, ModelCache]:
    """:func:`forward` with each block run as a program of its own.

    The two kinds of block are two programs to compile, whatever the depth. Not to be traced. The
    cache is donated. With ``tuned`` false, XLA times no variants of its products on a GPU: the
    programs compile sooner and run slower.
    """
    run = compiled(tuned)
    x, cache = _blocks(run, params, cache, tokens, lengths, call)
    return _logits(run, params, x, lengths, call), cache


def extend_by_block(
    params: ModelParams, cache: ModelCache, tokens: Array, lengths: Array | None, call: Call
) -> ModelCache:
    """:func:`forward_by_block` without logits: the new cache alone."""
    _, cache = _blocks(compiled(True), params, cache, tokens, lengths, call)
    return cache


class Run(Protocol):
    """How a part of :mod:`gdn_jax.models.blocks` runs: takes the part, returns what to call."""

    def __call__[**P, R](self, part: Callable[P, R], /) -> Callable[P, R]: ...


def _traced[**P, R](part: Callable[P, R], /) -> Callable[P, R]:
    """The part itself, which becomes part of the caller's program."""
    return part


def compiled(tuned: bool) -> Run:
    """Each part as a compiled program, kept for the next call.

    A block's first argument and x are donated.
    """

    def run[**P, R](part: Callable[P, R], /) -> Callable[P, R]:
        return _program(part, tuned)

    return run


@functools.cache
def _program(part: Callable[..., Any], tuned: bool) -> Callable[..., Any]:
    jit = functools.partial(
        jax.jit, compiler_options=None if tuned else {"xla_gpu_autotune_level": 0}
    )
    if part is embed:
        return jit(part)
    if part is head:
        return jit(part, static_argnames="call")

    @functools.wraps(part)
    def alone(*args: Any) -> tuple[Any, Array]:
        """A block that returns x as one array: it takes the sum that the next block would take."""
        carried, x = part(*args)
        return carried, whole(x)

    return jit(alone, static_argnums=5, donate_argnums=(0, 1))


def _blocks(
    run: Run,
    params: ModelParams,
    cache: ModelCache,
    tokens: Array,
    lengths: Array | None,
    call: Call,
) -> tuple[Stream, ModelCache]:
    """The residual stream after the last block, and the new cache."""
    B, T = tokens.shape
    x: Stream = run(embed)(params.embedding, tokens)
    states, k, v = cache.states, list(cache.k), list(cache.v)
    linear, full = itertools.count(), itertools.count()
    # A block must not be compiled again for what it does not use: only attention uses the cache.
    attending = call._replace(logits="all")
    plain = attending._replace(reach=None, fresh=False)
    for block in params.blocks:
        if isinstance(block.mixer, GDNParams):
            states, x = run(linear_block)(states, x, block, next(linear), lengths, plain)
        else:
            i = next(full)
            (k[i], v[i]), x = run(full_block)(
                (k[i], v[i]), x, block, cache.length, lengths, attending
            )
    length = cache.length + (jnp.full(B, T, jnp.int32) if lengths is None else lengths)
    return x, ModelCache(states, tuple(k), tuple(v), length)


def _logits(run: Run, params: ModelParams, x: Stream, lengths: Array | None, call: Call) -> Array:
    weight = params.embedding if params.head is None else params.head
    plain = call._replace(reach=None, fresh=False)
    return run(head)(params.norm, weight, x, lengths, plain)
