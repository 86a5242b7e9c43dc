"""The weights of a model, and the cache that its layers carry from token to token."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from gdn_jax.models.config import ModelConfig
from gdn_jax.params import GDNParams
from gdn_jax.state import GDNState, _zeros
from gdn_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionParams:
    """Gated full attention of H query heads and G key heads of width A, model width D.

    ``q_proj`` [2·H·A, D] gives every head its query and then its gate; ``k_proj``, ``v_proj``
    [G·A, D]; ``o_proj`` [D, H·A]; ``q_norm``, ``k_norm`` [A].
    """

    q_proj: Array
    k_proj: Array
    v_proj: Array
    o_proj: Array
    q_norm: Array
    k_norm: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockParams:
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; norms [D] have the weight 1 + w."""

    input_norm: Array
    mixer: GDNParams | AttentionParams
    mlp_norm: Array
    gate_proj: Array
    up_proj: Array
    down_proj: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ModelParams:
    """``embedding`` [vocab, D], the blocks in order, ``norm`` [D], ``head`` [vocab, D].

    ``head`` is None where it is the embedding.
    """

    embedding: Array
    blocks: tuple[BlockParams, ...]
    norm: Array
    head: Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ModelCache:
    """What B sequences carry: ``states`` of the linear layers, S [Lg, B, HV, K, V] and conv_hist;
    ``k``, ``v`` float32 [La, B, N, G, A] of the others, room for N tokens; ``length`` int32 [B].
    """

    states: GDNState
    k: Array
    v: Array
    length: Array

    @classmethod
    def zeros(cls, cfg: ModelConfig, batch: int, room: int) -> Self:
        """For ``batch`` new sequences of up to ``room`` tokens."""
        states = _zeros("ModelCache.zeros", cfg.gdn, (len(cfg.linear_layers), batch))
        shape = (len(cfg.full_layers), batch, room, cfg.num_key_value_heads, cfg.head_dim)
        k, v = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
        return cls(states, k, v, jnp.zeros(batch, jnp.int32))

    @property
    def room(self) -> int:
        """N."""
        return self.k.shape[2]
