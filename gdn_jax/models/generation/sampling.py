"""How a token is chosen from logits: pure functions of logits, settings, row and position."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax.errors import GenerationError
from gdn_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """The settings as arrays; which of them have an effect is static.

    They apply in this order: logits of tokens that a row has seen are divided (above 0) or
    multiplied (below) by ``repetition_penalty``; all logits are divided by ``temperature``; the
    ``top_k`` largest remain; of these remain the fewest most probable tokens that together have
    probability ``top_p``. Tokens as probable as the last one that remains also remain. Temperature
    0 takes the largest logit.
    """

    key: Array
    temperature: Array
    top_k: Array
    top_p: Array
    repetition_penalty: Array
    greedy: bool = dataclasses.field(metadata=dict(static=True))
    limits_k: bool = dataclasses.field(metadata=dict(static=True))
    limits_p: bool = dataclasses.field(metadata=dict(static=True))
    penalises: bool = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def of(
        cls,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
    ) -> Self:
        """From plain numbers; ``top_k`` 0, ``top_p`` 1 and ``repetition_penalty`` 1 do nothing.

        Raises:
            GenerationError: a setting out of range.
        """
        whole = isinstance(top_k, int | np.integer) and isinstance(seed, int | np.integer)
        for name, value, ok, needed in (
            ("temperature", temperature, 0 <= temperature < math.inf, "a number from 0 up"),
            ("top_k", top_k, whole and top_k >= 0, "a whole number from 0 up"),
            ("top_p", top_p, 0 < top_p <= 1, "a number above 0, up to 1"),
            (
                "repetition_penalty",
                repetition_penalty,
                0 < repetition_penalty < math.inf,
                "a number above 0",
            ),
            ("seed", seed, whole and 0 <= seed < 2**32, "a whole number from 0 to 2**32 - 1"),
        ):
            if not ok:
                raise GenerationError(f"{name} is {value!r}; needed {needed}")
        return cls(
            jax.random.key(np.uint32(seed)),
            jnp.float32(temperature),
            jnp.int32(min(top_k, 2**31 - 1)),
            jnp.float32(top_p),
            jnp.float32(repetition_penalty),
            greedy=temperature == 0,
            limits_k=top_k > 0,
            limits_p=top_p < 1,
            penalises=repetition_penalty != 1,
        )


def choose(
    logits: Array, sampling: Sampling, rows: Array, positions: Array, seen: Array | None
) -> tuple[Array, Array]:
    """One token for each row, and its log-probability under ``logits`` as given.

    A row's choice depends on its logits, the seed, and its entries in the arguments; not on the
    other rows.

    Args:
        logits: float32 [B, vocab].
        sampling: the settings.
        rows: int32 [B], a number for each row, from which its random draws come.
        positions: int32 [B], how many tokens have been chosen for the row before.
        seen: bool [B, vocab], the tokens of each row's prompt and answer; None without a penalty.

    Returns:
        int32 [B] and float32 [B].
    """
    scores = logits
    if sampling.penalises:
        assert seen is not None
        scores = penalised(scores, seen, sampling.repetition_penalty)
    if not sampling.greedy:
        scores = scores / sampling.temperature
        if sampling.limits_k:
            scores = largest(scores, sampling.top_k)
        if sampling.limits_p:
            scores = most_probable(scores, sampling.top_p)
        scores = scores + jax.vmap(_noise, (None, 0, 0, None))(
            sampling.key, rows, positions, logits.shape[-1]
        )
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    taken = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, taken - jax.nn.logsumexp(logits, axis=-1)


def penalised(logits: Array, seen: Array, penalty: Array) -> Array:
    """Logits, those of seen tokens divided by the penalty where above 0, else multiplied by it."""
    changed = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, changed, logits)


def largest(logits: Array, k: Array) -> Array:
    """The k largest logits of each row and those equal to the last of them; -inf elsewhere."""
    return _kept(logits, jnp.ones_like(logits), k.astype(jnp.float32))


def most_probable(logits: Array, p: Array) -> Array:
    """Logits of the fewest most probable tokens that together have probability p; -inf elsewhere.

    Ties are kept. All tokens are kept where rounding leaves their sum short of p.
    """
    return _kept(logits, jax.nn.softmax(logits, axis=-1), p)


def _kept(logits: Array, shares: Array, enough: Array) -> Array:
    """The logits at or above a bound, -inf elsewhere.

    The bound is the highest at which the shares of the logits kept add up to ``enough``. It is
    computed four bits at a time, on integers in the order of the floats: eight passes, no sort.
    """
    # Otherwise -0 would be below 0.
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0, logits), jnp.uint32)
    top = jnp.uint32(1 << 31)
    order = jnp.where(bits >= top, ~bits, bits | top)

    def digit(i: Array, bound: Array) -> Array:
        shift = (28 - 4 * i).astype(jnp.uint32)
        bounds = bound[..., None] | jnp.arange(1, 16, dtype=jnp.uint32)[None] << shift
        kept = order[..., None, :] >= bounds[..., None]
        total = jnp.sum(jnp.where(kept, shares[..., None, :], 0), axis=-1)
        return bound | jnp.sum(total >= enough, axis=-1, dtype=jnp.uint32) << shift

    bound = lax.fori_loop(0, 8, digit, jnp.zeros(logits.shape[:-1], jnp.uint32))
    return jnp.where(order >= bound[..., None], logits, -jnp.inf)


def _noise(key: Array, row: Array, position: Array, size: int) -> Array:
    """Gumbel noise: the largest of logits with it is a sample of their softmax."""
    key = jax.random.fold_in(jax.random.fold_in(key, row), position)
    return jax.random.gumbel(key, (size,), jnp.float32)
