"""What a model carries from token to token: the states of linear layers, keys and values."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from gdn_jax.errors import GenerationError
from gdn_jax.layer.state import GDNState, zeros
from gdn_jax.models.config import ModelConfig
from gdn_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ModelCache:
    """What B sequences carry, row b in slot b.

    ``states`` is one stack for the Lg linear layers, S float32 [Lg, B, HV, K, V] and conv_hist;
    ``k`` and ``v`` have one array [B, G, N, A] for each of the other layers, room for N tokens;
    ``length`` int32 [B] counts the tokens held. Keys and values are not stacked, because reading a
    layer of a stack would copy the stack; heads come before tokens, because the product by head
    would copy the other order.

    A token beyond the room is dropped, never put elsewhere: call :func:`check_room` before.
    """

    states: GDNState
    k: tuple[Array, ...]
    v: tuple[Array, ...]
    length: Array

    @classmethod
    def zeros(cls, cfg: ModelConfig, batch: int, room: int, dtype: Any = jnp.float32) -> Self:
        """An empty cache for ``batch`` sequences of up to ``room`` tokens; keys are ``dtype``."""
        states = zeros("ModelCache.zeros", cfg.gdn, (len(cfg.linear_layers), batch))
        shape = (batch, cfg.num_key_value_heads, room, cfg.head_dim)
        k, v = (tuple(jnp.zeros(shape, dtype) for _ in cfg.full_layers) for _ in "kv")
        return cls(states, k, v, jnp.zeros(batch, jnp.int32))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


def check_room(where: str, needed: int, room: int, what: str) -> None:
    """Raise GenerationError unless ``needed`` tokens fit into ``room``."""
    if needed > room:
        raise GenerationError(f"{where}: {what} needs room for {needed} tokens; there is {room}")
