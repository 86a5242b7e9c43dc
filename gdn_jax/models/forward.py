"""A model's tokens to logits: the only place where its blocks are composed."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.layer.compose import forward as gdn_step
from gdn_jax.layer.compose import prefill_tokens
from gdn_jax.layer.pallas import KernelLayer
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState
from gdn_jax.models.attention import attend
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams, BlockParams, ModelParams
from gdn_jax.models.residual import Stream, added, joined, normed, whole
from gdn_jax.models.route import PLAIN, Route, products
from gdn_jax.quant.project import Weight
from gdn_jax.types import Array


class Call(NamedTuple):
    """What is static in a call: see :func:`forward`."""

    cfg: ModelConfig
    route: Route = PLAIN
    reach: int | None = None
    fresh: bool = False
    logits: str = "all"


def forward(
    params: ModelParams,
    cache: ModelCache,
    tokens: Array,
    cfg: ModelConfig,
    *,
    lengths: Array | None = None,
    route: Route = PLAIN,
    reach: int | None = None,
    fresh: bool = False,
    logits: str = "all",
) -> tuple[Array, ModelCache]:
    """Logits of tokens after those that the cache has, and the cache with them.

    One token a row is a decode step, more are a prefill. The residual stream, the states and the
    logits are float32, weights as they are. Traceable; jit it with the cache donated for an update
    in place. A token beyond the cache's room is lost without an error: see
    :func:`gdn_jax.models.cache.check_room`.

    Args:
        params: the weights; on the route ``"pallas"`` those of
            :func:`gdn_jax.models.loading.kernel_weights.to_kernel`.
        cache: of these rows, with room for their tokens.
        tokens: int32 [B, T].
        cfg, route: static.
        lengths: int32 [B]: how many tokens of a row count; those behind are padding, and a row of
            none is idle: it reads and writes nothing. All T by default.
        reach: static; at least the length of every row after this call, so that attention need
            not look at the rest of the cache. All of it by default.
        fresh: static; the caller knows that the cache is new, so that attention need not look at
            it at all.
        logits: static; ``"all"``, or ``"last"`` for those of every row's last token alone.

    Returns:
        float32 [B, T, vocab], of no meaning for padding, or [B, vocab]; and the new cache.
    """
    call = Call(cfg, route, reach, fresh, logits)
    y, cache = _through(_PLAIN, params, cache, tokens, lengths, call)
    assert y is not None
    return y, cache


def prefill_blocks(
    params: ModelParams,
    cache: ModelCache,
    tokens: Array,
    lengths: Array | None,
    call: Call,
    *,
    tuned: bool = True,
) -> tuple[Array | None, ModelCache]:
    """:func:`forward` with every block a program of its own: two to compile, whatever the depth.

    Not to be traced. The cache is donated. ``call.logits`` may be ``"none"`` too. Where it is not
    ``tuned``, XLA times no variants of its products on a GPU: sooner compiled, and slower.
    """
    return _through(_compiled(tuned), params, cache, tokens, lengths, call)


def _embed(embedding: Array, tokens: Array) -> Array:
    return embedding[tokens].astype(jnp.float32)


def _linear_block(
    states: GDNState,
    x: Stream,
    block: BlockParams,
    index: int | Array,
    lengths: Array | None,
    call: Call,
) -> tuple[GDNState, Stream]:
    """A block whose mixer is layer ``index`` of the states."""
    cfg, params = call.cfg, block.mixer
    assert isinstance(params, GDNParams)
    x, h = normed(x, block.input_norm, cfg.norm_eps)
    if x.shape[1] > 1:
        own = jax.tree.map(lambda s: s[index], states)
        route = call.route
        h, own = prefill_tokens(
            params, own, h, cfg.gdn, lengths, precision=route.precision, backend=route.rule
        )
        x, states = x + h, jax.tree.map(lambda s, new: s.at[index].set(new), states, own)
    elif call.route.backend == "pallas":
        slots = None
        if lengths is not None:
            slot = jnp.where(lengths > 0, jnp.arange(len(x), dtype=jnp.int32), -1)
            slots = slot, slot
        layer = KernelLayer(params, cfg.gdn)
        parts, states, _ = layer.step(states, index, h[:, 0], slots=slots, summed=False)
        x = joined(parts, x)
    else:
        own = jax.tree.map(lambda s: s[index], states)
        y, new, _ = gdn_step(params, own, h[:, 0], cfg.gdn)
        if lengths is not None:
            new = jax.tree.map(functools.partial(_where_active, lengths), new, own)
        states = jax.tree.map(lambda s, n: s.at[index].set(n), states, new)
        # Else the next layer's part is taken from the stack as it was, which a loop then copies.
        x, states = lax.optimization_barrier((x + y[:, None], states))
    return states, _mlp(block, x, call)


def _where_active(lengths: Array, new: Array, old: Array) -> Array:
    return jnp.where(lengths.reshape(-1, *[1] * (new.ndim - 1)) > 0, new, old)


def _full_block(
    kv: tuple[Array, Array],
    x: Stream,
    block: BlockParams,
    start: Array,
    lengths: Array | None,
    call: Call,
) -> tuple[tuple[Array, Array], Stream]:
    """A block of full attention over its own keys and values."""
    assert isinstance(block.mixer, AttentionParams)
    x, h = normed(x, block.input_norm, call.cfg.norm_eps)
    y, k, v = attend(
        block.mixer,
        h,
        *kv,
        start,
        call.cfg,
        residual=x,
        route=call.route,
        lengths=lengths,
        reach=call.reach,
        fresh=call.fresh,
    )
    return (k, v), _mlp(block, y, call)


def _mlp(block: BlockParams, x: Stream, call: Call) -> Stream:
    """SwiGLU: ``x + Wdown·(silu(Wgate·h) · Wup·h)``."""
    x, h = normed(x, block.mlp_norm, call.cfg.norm_eps)
    # Many tokens' gates are the most that a prompt holds at once, and rounded for Wdown anyway.
    found = products(h, block.gate_proj, block.up_proj, route=call.route, rounded=True)
    gate, up = (y.astype(jnp.float32) for y in found)
    return added(jax.nn.silu(gate) * up, block.down_proj, x, call.route)


def _head(norm: Array, head: Weight, x: Stream, lengths: Array | None, call: Call) -> Array:
    """Logits [B, T, vocab], or [B, vocab] of the last token."""
    if call.logits == "last" and isinstance(x, jax.Array) and x.shape[1] > 1:
        if lengths is None:
            x = x[:, -1:]
        else:
            at = jnp.maximum(lengths - 1, 0)[:, None, None]
            x = jnp.take_along_axis(x, at, axis=1)
    _, h = normed(x, norm, call.cfg.norm_eps)
    (y,) = products(h, head, route=call.route)
    return y[:, 0] if call.logits == "last" else y


class _Parts(NamedTuple):
    """The functions that a model is made of."""

    embed: Any
    linear: Any
    full: Any
    head: Any


_PLAIN = _Parts(_embed, _linear_block, _full_block, _head)


@functools.cache
def _compiled(tuned: bool) -> _Parts:
    """Each part as a program."""
    jit = functools.partial(
        jax.jit, compiler_options=None if tuned else {"xla_gpu_autotune_level": 0}
    )

    def alone(block: Callable[..., tuple[Any, Stream]]) -> Any:
        """A block, which ends with the sums that another would begin with."""

        @functools.wraps(block)
        def run(*args: Any) -> tuple[Any, Array]:
            state, x = block(*args)
            return state, whole(x)

        return jit(run, static_argnums=5, donate_argnums=(0, 1))

    return _Parts(
        jit(_embed), alone(_linear_block), alone(_full_block), jit(_head, static_argnames="call")
    )


def _through(
    parts: _Parts,
    params: ModelParams,
    cache: ModelCache,
    tokens: Array,
    lengths: Array | None,
    call: Call,
) -> tuple[Array | None, ModelCache]:
    B, T = tokens.shape
    x = parts.embed(params.embedding, tokens)
    states, k, v = cache.states, list(cache.k), list(cache.v)
    linear, full = itertools.count(), itertools.count()
    # What a block does not depend on must not compile it anew: only attention looks at the cache.
    attending = call._replace(logits="all")
    plain = attending._replace(reach=None, fresh=False)
    for block in params.blocks:
        if isinstance(block.mixer, AttentionParams):
            i = next(full)
            (k[i], v[i]), x = parts.full((k[i], v[i]), x, block, cache.length, lengths, attending)
        else:
            states, x = parts.linear(states, x, block, next(linear), lengths, plain)
    head = params.embedding if params.head is None else params.head
    y = None
    if call.logits != "none":
        y = parts.head(params.norm, head, x, lengths, plain._replace(logits=call.logits))
    length = cache.length + (jnp.full(B, T, jnp.int32) if lengths is None else lengths)
    return y, ModelCache(states, tuple(k), tuple(v), length)
