"""Kernels that no public function runs by itself: here alone does the bench call them."""

from collections.abc import Mapping

import jax

from gdn_jax.config import GDNConfig
from gdn_jax.quant.kernel_layout import Q4Kernel
from pallas_kernels import support, tuning
from pallas_kernels.kernels import float_gemv, middle, stream
from pallas_kernels.place import Place


def float_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x·wᵀ``, x float32 [B, K], w [N, K] in float32 or bfloat16."""
    return float_gemv.gemv(x, w)


def read_words(x: jax.Array, w: Q4Kernel) -> jax.Array:
    """The sum of each CTA's words of w, in a launch that follows the one that makes x."""
    return stream.sums(w.blocks, after=x)


def read_reason(words: int) -> str | None:
    """Why :func:`read_words` cannot run on so many words; None where it can."""
    return stream.unavailable_reason(words)


def middle_inputs(x: Mapping[str, jax.Array]) -> tuple[middle.Projected, middle.Small]:
    """The operands of :func:`middle_step` besides the state.

    ``x`` has partial sums qkv [P, B, C], z [P, B, HV·V], b and a [P, B, HV], the taps conv [C, W],
    the history hist [B, W-1, C], and A_log, dt_bias, norm. What the frames of the history
    contribute to the convolution is computed here.
    """
    pre = (x["hist"] * x["conv"].T[None, :-1]).sum(axis=1)
    projected = middle.Projected(x["qkv"], x["z"], x["b"], x["a"], pre, x["conv"][:, -1])
    return projected, middle.Small(x["A_log"], x["dt_bias"], x["norm"])


def middle_step(
    cfg: GDNConfig,
    inputs: tuple[middle.Projected, middle.Small],
    S: jax.Array,
    hist: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Steps 2 to 6 of one layer of a stack in one launch: ONN [B, HV·V], and S and hist after it.

    S [L, B, HV, K, V] and hist [L, B, W-1, C] change only in ``layer`` int32 [1], and in place
    where XLA may do so.
    """
    heads = middle.Heads(
        cfg.num_k_heads, cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim, cfg.norm_eps
    )
    tile = tuning.middle_tile(S.shape[1], heads.V, support.has_clusters())
    at_S, at_hist = jax.new_ref(S), jax.new_ref(hist)
    projected, small = inputs
    onn, _ = middle.middle(projected, small, at_S, at_hist, Place(layer), heads, tile=tile)
    return onn, at_S[...], at_hist[...]
