"""The weights of one layer."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax._core.checks import FLOATS, check_array, check_config
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError
from gdn_jax.quant.kernel_layout import Q4Kernel, check_int4
from gdn_jax.quant.q4array import Q4Array
from gdn_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GDNParams:
    """Weights of one Gated DeltaNet layer, a pytree; rows are output channels.

    Each of the three large projections is a float32, bfloat16 or float16 array, used in float32, or
    a :class:`gdn_jax.Q4Array` or :class:`gdn_jax.Q4Kernel`. The six small tensors are float32.

    ===========  ============  =====================================================
    field        shape         use
    ===========  ============  =====================================================
    in_proj_qkv  [C, D]        rows in the order q, k, v
    in_proj_z    [HV·V, D]     gate of the output norm
    in_proj_b    [HV, D]       ``beta = sigmoid(b)``
    in_proj_a    [HV, D]       ``g = -exp(A_log) · softplus(a + dt_bias)``
    conv_weight  [C, W]        tap j multiplies window entry j, oldest first
    A_log        [HV]
    dt_bias      [HV]
    norm_weight  [V]           used as it is, not 1 + w
    out_proj     [D, HV·V]
    ===========  ============  =====================================================
    """

    in_proj_qkv: Array | Q4Array | Q4Kernel
    in_proj_z: Array | Q4Array | Q4Kernel
    in_proj_b: Array
    in_proj_a: Array
    conv_weight: Array
    A_log: Array
    dt_bias: Array
    norm_weight: Array
    out_proj: Array | Q4Array | Q4Kernel


LARGE = ("in_proj_qkv", "in_proj_z", "out_proj")
"""The projections that dominate a layer's bytes."""

SMALL = ("in_proj_b", "in_proj_a", "conv_weight", "A_log", "dt_bias", "norm_weight")
"""The tensors that are float32 in every tier."""


def param_dims(cfg: GDNConfig) -> dict[str, tuple[tuple[str, int], ...]]:
    """Named dimensions of every field of GDNParams."""
    D, C, HV = ("D", cfg.d_model), ("C", cfg.conv_dim), ("HV", cfg.num_v_heads)
    VD = ("HV*V", cfg.value_dim)
    return {
        "in_proj_qkv": (C, D),
        "in_proj_z": (VD, D),
        "in_proj_b": (HV, D),
        "in_proj_a": (HV, D),
        "conv_weight": (C, ("W", cfg.conv_width)),
        "A_log": (HV,),
        "dt_bias": (HV,),
        "norm_weight": (("V", cfg.head_v_dim),),
        "out_proj": (D, VD),
    }


def check_params(
    where: str, params: Any, cfg: GDNConfig, fields: tuple[str, ...] = LARGE + SMALL
) -> None:
    """Raise ShapeError unless these fields of ``params``, a GDNParams, fit the configuration."""
    check_config(where, cfg)
    if not isinstance(params, GDNParams):
        raise ShapeError(f"{where}: params is a {type(params).__name__}; needed gdn_jax.GDNParams")
    for name in fields:
        weight, dims = getattr(params, name), param_dims(cfg)[name]
        if name in LARGE and isinstance(weight, Q4Array | Q4Kernel):
            check_int4(where, f"params.{name}", weight, dims)
        else:
            dtypes = FLOATS if name in LARGE else (jnp.float32,)
            check_array(where, f"params.{name}", weight, dims, dtypes)


def init_params(key: Array, cfg: GDNConfig) -> GDNParams:
    """Random float32 weights in the ranges of trained layers.

    Projections are normal with standard deviation 1/sqrt(fan-in), convolution taps uniform in
    ±W**-0.5, ``A = exp(A_log)`` uniform in (0, 16), ``softplus(dt_bias)`` log-uniform in
    (1e-3, 1e-1), and the norm weight normal about 1.

    Args:
        key: a JAX random key.
        cfg: the layer's sizes.

    Raises:
        ShapeError: ``cfg`` is not a GDNConfig.
    """
    check_config("init_params", cfg)
    return _drawn(key, cfg)


@functools.partial(jax.jit, static_argnames="cfg")
def _drawn(key: Array, cfg: GDNConfig) -> GDNParams:
    names = list(param_dims(cfg))
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    shapes = {n: tuple(size for _, size in dims) for n, dims in param_dims(cfg).items()}

    def normal(name: str) -> Array:
        return jax.random.normal(keys[name], shapes[name]) / jnp.sqrt(shapes[name][-1])

    def uniform(name: str, low: float, high: float) -> Array:
        return jax.random.uniform(keys[name], shapes[name], minval=low, maxval=high)

    dt = jnp.exp(uniform("dt_bias", math.log(1e-3), math.log(1e-1)))
    tap = cfg.conv_width**-0.5
    return GDNParams(
        in_proj_qkv=normal("in_proj_qkv"),
        in_proj_z=normal("in_proj_z"),
        in_proj_b=normal("in_proj_b"),
        in_proj_a=normal("in_proj_a"),
        conv_weight=uniform("conv_weight", -tap, tap),
        A_log=jnp.log(uniform("A_log", 1e-2, 16.0)),
        dt_bias=dt + jnp.log(-jnp.expm1(-dt)),
        norm_weight=1.0 + 0.1 * jax.random.normal(keys["norm_weight"], shapes["norm_weight"]),
        out_proj=normal("out_proj"),
    )
