"""A model's int4 weights in the order that the GPU kernels read."""

from typing import Any

import jax

from gdn_jax.models.params import ModelParams
from gdn_jax.quant import kernel_layout
from gdn_jax.quant.kernel_layout import Q4Kernel
from gdn_jax.quant.q4array import Q4Array
from pallas_kernels import q4_layout


def to_kernel(params: ModelParams) -> ModelParams:
    """The model with every Q4Array laid out for the kernels, where both sizes are multiples of 64.

    One matrix at a time: its old form is deleted before the next one is laid out, so that the
    device holds the model and a few copies of its largest matrix, and gaps where sizes differ:
    loading lays out on the way (``load_params(kernel=True)``). ``params`` is used up.
    """
    return jax.tree.map(_moved, params, is_leaf=lambda x: isinstance(x, Q4Array | Q4Kernel))


def _moved(weight: Any) -> Any:
    if not isinstance(weight, Q4Array) or q4_layout.unavailable_reason(*weight.shape):
        return weight
    laid_out = jax.block_until_ready(kernel_layout.to_kernel(weight))
    for x in (weight.packed, weight.scales):
        x.delete()
    return laid_out
