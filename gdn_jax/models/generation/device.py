"""Generation on the device: prompts in pieces, then one compiled loop for many tokens."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax.models.cache import ModelCache
from gdn_jax.models.forward import extend_by_block, forward, forward_by_block
from gdn_jax.models.generation.sampling import Sampling, choose
from gdn_jax.models.params import ModelParams
from gdn_jax.models.route import Call, Route
from gdn_jax.types import Array

PROMPT_PIECE = 2048
"""The most tokens of a prompt that run at once."""
LARGE_ROOM = 8 * PROMPT_PIECE
"""Above this room of a cache pieces are half as long: less memory is free, masks are larger."""
PROMPT_PIECES = 2 * PROMPT_PIECE
"""The most tokens of all prompts together that run at once, unless there are more rows."""
SMALLEST = 16, 256
"""The smallest number of tokens, and of places in the cache, that a program is compiled for."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """What B sequences carry between two tokens of generation.

    ``token`` int32 [B] is each row's next input; ``made`` counts the tokens chosen so far, ``left``
    those still wanted, and a row with none left is idle; ``seen`` bool [B, vocab] marks the tokens
    of the prompt and the answer, where a penalty needs them.
    """

    cache: ModelCache
    token: Array
    made: Array
    left: Array
    seen: Array | None


class Chosen(NamedTuple):
    """Tokens int32 [n, B], -1 in idle rows, and their log-probabilities float32 [n, B]."""

    tokens: Array
    logprobs: Array


def bucket(n: int, smallest: int) -> int:
    """The least power of two that is at least ``n`` and at least ``smallest``."""
    return max(smallest, 1 << max(n - 1, 0).bit_length())


def reach_of(bound: int, room: int) -> int:
    """How many places of the cache attention reads for rows of up to ``bound`` tokens."""
    return min(bucket(bound, SMALLEST[1]), room)


def step_reach(route: Route, rows: int, bound: int, room: int) -> int:
    """How many places of the cache attention reads for one token a row.

    A loop is compiled for each different result. Where keys are read by length, it is the whole
    room. Otherwise XLA first copies the part that it reads, which moves three times the bytes of
    that part: this is cheaper than reading the whole room only for a quarter of it or less.
    """
    reach = reach_of(bound, room)
    return room if route.reads_by_length(rows) or 4 * reach > room else reach


def pieces_of(lengths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Where the pieces of prompts begin, and how many tokens wide they are, padding included.

    ``room`` is that of the cache which the prompts go into.
    """
    longest, share = max(lengths), PROMPT_PIECES // len(lengths)
    most = min(PROMPT_PIECE, max(SMALLEST[0], 1 << max(share, 1).bit_length() - 1))
    if room > LARGE_ROOM:
        most = min(most, PROMPT_PIECE // 2)
    starts = range(0, longest, most)
    return [(start, min(most, bucket(longest - start, SMALLEST[0]))) for start in starts]


def padded(rows: Sequence[np.ndarray], start: int, width: int) -> tuple[Array, Array]:
    """Tokens ``start`` to ``start + width - 1`` of every row, padded, and how many each row has."""
    ids = np.zeros((len(rows), width), np.int32)
    lengths = np.zeros(len(rows), np.int32)
    for b, row in enumerate(rows):
        piece = row[start : start + width]
        ids[b, : len(piece)], lengths[b] = piece, len(piece)
    return jnp.asarray(ids), jnp.asarray(lengths)


def prefill(
    params: ModelParams, cache: ModelCache, prompts: Sequence[np.ndarray], room: int, call: Call
) -> tuple[Array, ModelCache]:
    """Logits [B, vocab] of the last token of each prompt, and the cache after the prompts.

    ``cache`` must be empty, and is donated.
    """
    last = None
    for start, width in pieces_of([len(p) for p in prompts], room):
        ids, lengths = padded(prompts, start, width)
        how = call._replace(reach=reach_of(start + width, room), fresh=start == 0, logits="last")
        ends = np.asarray([start < len(p) <= start + width for p in prompts])
        if not ends.any():
            cache = extend_by_block(params, cache, ids, lengths, how)
            continue
        y, cache = forward_by_block(params, cache, ids, lengths, how)
        last = y if last is None else _merge(jnp.asarray(ends), y, last)
    assert last is not None
    return last, cache


@jax.jit
def _merge(mask: Array, new: Array, old: Array) -> Array:
    return jnp.where(mask[:, None], new, old)


def _pick(rows: Rows, logits: Array, sampling: Sampling, stops: Array) -> tuple[Rows, Chosen]:
    """The next token of every row that is not idle."""
    B = len(rows.token)
    numbers = jnp.arange(B, dtype=jnp.int32)
    tokens, logprobs = choose(logits, sampling, numbers, rows.made, rows.seen)
    active = rows.left > 0
    stopped = (tokens[:, None] == stops[None]).any(axis=-1)
    seen = rows.seen
    if seen is not None:
        seen = seen.at[numbers, tokens].max(active)
    rows = Rows(
        rows.cache,
        jnp.where(active, tokens, rows.token),
        rows.made + active.astype(jnp.int32),
        jnp.where(active & ~stopped, rows.left - 1, 0),
        seen,
    )
    return rows, Chosen(jnp.where(active, tokens, -1), logprobs)


@functools.partial(jax.jit, donate_argnames="rows")
def first(rows: Rows, logits: Array, sampling: Sampling, stops: Array) -> tuple[Rows, Chosen]:
    """The first token of every row, from the logits of its prompt; n = 1."""
    rows, chosen = _pick(rows, logits, sampling, stops)
    return rows, Chosen(*(x[None] for x in chosen))


@functools.partial(jax.jit, static_argnames=("call", "n"), donate_argnames="rows")
def decode(
    params: ModelParams,
    rows: Rows,
    keep: Array,
    sampling: Sampling,
    stops: Array,
    call: Call,
    n: int,
) -> tuple[Rows, Chosen]:
    """n more tokens of every row, in one loop on the device whose length is known beforehand.

    A loop that stops when the last row ends would wait for the host before each token.

    Args:
        params: the weights.
        rows: donated.
        keep: bool [B]; a row that is not kept ends.
        sampling: how tokens are chosen.
        stops: int32, one axis of any length: tokens that end a row.
        call, n: static.
    """

    last = call._replace(logits="last")

    def token(rows: Rows, _: None) -> tuple[Rows, Chosen]:
        active = (rows.left > 0).astype(jnp.int32)
        logits, cache = forward(params, rows.cache, rows.token[:, None], active, last)
        return _pick(dataclasses.replace(rows, cache=cache), logits, sampling, stops)

    rows = dataclasses.replace(rows, left=jnp.where(keep, rows.left, 0))
    return lax.scan(token, rows, length=n)
