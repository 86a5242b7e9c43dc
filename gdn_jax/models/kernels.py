"""What a model runs on the GPU kernels outside its linear layers, and weights in their layout.

Models call :mod:`pallas_kernels` here alone; linear layers do so through
:class:`gdn_jax.layer.pallas.KernelLayer`. Each function takes one token a row, B rows, and is one
launch unless it says otherwise.
"""

from typing import Any

import jax
import numpy as np

from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams, ModelParams
from gdn_jax.quant import kernel_layout
from gdn_jax.quant.kernel_layout import Q4Kernel
from gdn_jax.quant.project import Weight
from gdn_jax.quant.q4array import Q4Array
from gdn_jax.types import Array
from pallas_kernels import joint, q4_layout
from pallas_kernels.kernels import attention_inputs, float_gemv, q4_gemv, residual_norm
from pallas_kernels.layer import is_int4

TILE, BLOCK = q4_layout.TILE, q4_layout.BLOCK
"""Rows and columns of a block of int4 weights, and the shape of its int32 words."""


def products(x: Array, *weights: Weight) -> tuple[Array, ...]:
    """``w·x`` for every weight: x float32 [B, K] -> float32 [B, N] each."""
    return joint.products(x, *map(_as_read, weights))


def sliced_product(x: Array, w: Weight) -> Array:
    """``w·x`` as partial sums over slices of K, to be added in order: [B, K] -> [splits, B, N]."""
    read = _as_read(w)
    return q4_gemv.gemv_parts(x, read) if is_int4(read) else float_gemv.gemv(x, read)[None]


def adds_slices(D: int) -> bool:
    """Whether :func:`sum_and_norm` can run on rows of D numbers."""
    return residual_norm.unavailable_reason(D) is None


def sum_and_norm(parts: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """``x = sum(parts) + residual`` and its RMS norm ``(1 + w) · x · rsqrt(mean(x²) + eps)``.

    ``parts`` are a :func:`sliced_product` [splits, B, D], all else is [B, D] or [D].
    """
    return residual_norm.residual_norm(parts, residual, weight, eps=eps)


def takes_heads(cfg: ModelConfig) -> bool:
    """Whether :func:`queries_and_caches` can run on heads of these sizes."""
    return attention_inputs.unavailable_reason(cfg.head_dim, cfg.rotary_dim) is None


def queries_and_caches(
    params: AttentionParams,
    x: Array,
    angles: tuple[Array, Array],
    at: Array,
    caches: tuple[Array, Array],
    eps: float,
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Queries and gates [B, H, A], and the caches with the tokens' keys and values; two launches.

    Args:
        params: of the layer.
        x: float32 [B, D].
        angles: cos and sin [B, R/2] of the rows' positions.
        at: int32 [B], the place in the caches [B, G, N, A]; nowhere if negative.
        caches: of keys and of values.
        eps: of the norms.
    """
    weights = map(_as_read, (params.q_proj, params.k_proj, params.v_proj))
    q, gate, k_cache, v_cache = attention_inputs.attention_inputs(
        attention_inputs.Slices(*joint.slices(x, *weights)),
        attention_inputs.Norms(params.q_norm, params.k_norm),
        attention_inputs.Turn(*angles),
        at,
        *caches,
        eps=eps,
    )
    return q, gate, (k_cache, v_cache)


def has_layout(shape: tuple[int, ...]) -> bool:
    """Whether int4 weights [N, K] can be laid out for the kernels."""
    N, K = shape
    return q4_layout.unavailable_reason(N, K) is None


def fill_blocks(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    """Lay out rows of int4 on the host, into ``blocks`` int32 [N/64, K/64, 9, 64]."""
    q4_layout.pack_into(blocks, words, scales)


def lay_out(params: ModelParams) -> ModelParams:
    """The model with every Q4Array laid out for the kernels, where both sizes are multiples of 64.

    ``params`` is used up: each matrix is deleted before the next one is laid out, so the device
    holds the model, a few copies of its largest matrix, and gaps where sizes differ. Loading with
    ``load_params(kernel=True)`` needs none of this, because it lays out on the way.
    """
    return jax.tree.map(_moved, params, is_leaf=lambda x: isinstance(x, Q4Array | Q4Kernel))


def _moved(weight: Any) -> Any:
    if not isinstance(weight, Q4Array) or not has_layout(weight.shape):
        return weight
    laid_out = jax.block_until_ready(kernel_layout.to_kernel(weight))
    for x in (weight.packed, weight.scales):
        x.delete()
    return laid_out


def _as_read(w: Weight) -> Array:
    """The array of a weight that the kernels read."""
    assert not isinstance(w, Q4Array)
    return w.blocks if isinstance(w, Q4Kernel) else w
