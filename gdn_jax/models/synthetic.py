"""Random weights of a model of any size, drawn on the device."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax._core.backend import select_backend
from gdn_jax.models import kernels
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.loading.weights import WeightSpec, assemble, check_weights, weight_table
from gdn_jax.models.params import ModelParams
from gdn_jax.quant.kernel_layout import Q4Kernel
from gdn_jax.quant.q4array import GROUP, Q4Array
from gdn_jax.types import Array

_RMS = math.sqrt(sum(n * n for n in range(-8, 8)) / 16)
"""The root mean square of equally likely integers -8..7."""

_SIGNS = 0x80008000
"""The sign bits of two float16 in a word."""


def model_params_like(
    cfg: ModelConfig, key: Array, weights: str = "bf16", *, kernel: bool | None = None
) -> ModelParams:
    """Random weights of a model, as wide as :func:`load_params` holds them.

    Projections have the variance 1/fan-in. They are uniform numbers; in int4, equally likely
    integers with scales of one magnitude and random sign. Small tensors are in the ranges of
    :func:`init_params`, norms about 1. A projection is drawn by one elementwise pass over its own
    memory; only small tensors come from the host.

    Args:
        cfg: sizes.
        key: a JAX random key.
        weights: ``"bf16"``, ``"q4"`` or ``"f32"``.
        kernel: whether int4 is in the kernels' layout where the sizes allow it; None: where they
            can run.

    Raises:
        UnknownNameError: no such ``weights``.
    """
    check_weights("model_params_like", weights)
    if kernel is None:
        kernel = select_backend("q4_matmul") == "pallas"
    table = weight_table(cfg)
    seeds = np.asarray(jax.random.bits(key, (len(table),), jnp.uint32))
    arrays: dict[str, Any] = {}
    for (name, weight), seed in zip(table.items(), seeds, strict=True):
        if weight.role == "small":
            made = jnp.asarray(_small(name.rpartition(".")[2], weight.shape, int(seed)))
        else:
            made = _matrix(jnp.asarray(seed), weight, weight.held(weights), kernel)
        arrays[name] = jax.block_until_ready(made)
    return assemble(cfg, arrays)


def _small(field: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).uniform(-1, 1, shape)
    if field == "A_log":
        x = np.log(8 + 7.99 * x)
    elif field == "dt_bias":
        dt = 10 ** (x - 2)
        x = dt + np.log(-np.expm1(-dt))
    elif field == "norm_weight":
        x = 1 + 0.2 * x
    elif field == "conv_weight":
        x *= shape[-1] ** -0.5
    else:
        x *= 0.2 if field.endswith("norm") else math.sqrt(3 / shape[-1])
    return x.astype(np.float32)


@functools.partial(jax.jit, static_argnames=("weight", "held", "kernel"))
def _matrix(seed: Array, weight: WeightSpec, held: str, kernel: bool) -> Array | Q4Array | Q4Kernel:
    N, K = weight.shape
    std = 1.0 if weight.role == "embedding" else K**-0.5
    if held != "q4":
        signed = lax.bitcast_convert_type(_bits(seed, weight.shape), jnp.int32)
        unit = signed.astype(jnp.float32) * (math.sqrt(3) * std * 2.0**-31)
        return unit.astype({"f32": jnp.float32, "bf16": jnp.bfloat16}[held])
    size = int(np.float16(std / _RMS).view(np.uint16))
    if kernel and kernels.has_layout((N, K)):
        words = _bits(seed, (N // kernels.TILE, K // kernels.TILE, *kernels.BLOCK))
        scales = (words & jnp.uint32(_SIGNS)) | jnp.uint32(size << 16 | size)
        last = lax.broadcasted_iota(jnp.int32, words.shape, 2) == kernels.BLOCK[0] - 1
        return Q4Kernel(lax.bitcast_convert_type(jnp.where(last, scales, words), jnp.int32))
    packed = lax.bitcast_convert_type(_bits(seed, (N, K // 8)), jnp.int32)
    signs = (_bits(~seed, (N, K // GROUP)) & jnp.uint32(_SIGNS)).astype(jnp.uint16)
    return Q4Array(packed, lax.bitcast_convert_type(signs | jnp.uint16(size), jnp.float16))


def _bits(seed: Array, shape: tuple[int, ...]) -> Array:
    """32 random bits an element, from its place and the seed by two rounds of mixing."""
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) * jnp.uint32(0x9E3779B9) + seed
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return x ^ (x >> 16)
