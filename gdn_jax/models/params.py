"""The weights of a model."""

import dataclasses

import jax

from gdn_jax.layer.params import GDNParams
from gdn_jax.quant.project import Weight
from gdn_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionParams:
    """Gated full attention of H query heads and G key heads of width A, model width D.

    ``q_proj`` [2·H·A, D] gives for each head its query, then its gate; ``k_proj``, ``v_proj``
    [G·A, D]; ``o_proj`` [D, H·A]; ``q_norm``, ``k_norm`` [A].
    """

    q_proj: Weight
    k_proj: Weight
    v_proj: Weight
    o_proj: Weight
    q_norm: Array
    k_norm: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockParams:
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; norms [D] have the weight 1 + w."""

    input_norm: Array
    mixer: GDNParams | AttentionParams
    mlp_norm: Array
    gate_proj: Weight
    up_proj: Weight
    down_proj: Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ModelParams:
    """``embedding`` [vocab, D], the blocks in order, ``norm`` [D], ``head`` [vocab, D].

    ``head`` is None where it is the embedding. Norms and the small tensors of GDN layers are
    float32, the embedding is float32 or bfloat16; projections and the head are float32, bfloat16
    or float16 arrays or int4.
    """

    embedding: Array
    blocks: tuple[BlockParams, ...]
    norm: Array
    head: Weight | None

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))
