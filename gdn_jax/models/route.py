"""How a model runs: which kernels, which attention, how wide the products are. Chosen once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax._core.backend import capability, choose, device_reason, select_backend
from gdn_jax.layer.pallas import matrices
from gdn_jax.layer.params import GDNParams
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams, ModelParams
from gdn_jax.quant.kernel_layout import Q4Kernel, matrix
from gdn_jax.quant.project import Rounded, Weight, project
from gdn_jax.quant.q4array import Q4Array
from gdn_jax.types import Array
from pallas_kernels import joint
from pallas_kernels.kernels import float_gemv, q4_gemv
from pallas_kernels.layer import is_int4

CUDNN_WIDTHS = {(8, 0): 128, (9, 0): 256}
"""Widest heads of cuDNN's attention from a compute capability on."""


@dataclasses.dataclass(frozen=True)
class Route:
    """Static, and the same for every call of a model.

    ``backend``: one token a row runs on the kernels (``"pallas"``) or on XLA. More tokens run on
    XLA but for the delta rule, which ``rule`` runs; with ``narrow`` what is multiplied is rounded
    to bfloat16. ``attention`` is ``"cudnn"`` or ``"xla"``.
    """

    backend: str = "xla"
    rule: str = "xla"
    attention: str = "xla"
    narrow: bool = False

    @property
    def precision(self) -> str:
        """Of :func:`gdn_jax.prefill`."""
        return "bfloat16" if self.narrow else "float32"

    def reads_by_length(self, rows: int) -> bool:
        """Whether attention of one token a row takes cuDNN, which reads the keys that there are.

        Of a single row XLA is as fast up to 65 000 tokens, beyond which they were not compared;
        of eight at 10 000 it is 1.4 times slower (H200).
        """
        return self.attention == "cudnn" and rows > 1

    @classmethod
    def choose(
        cls, params: ModelParams, cfg: ModelConfig, backend: str | None, dtype: Any
    ) -> "Route":
        """The route of these weights on this device, for keys and values of ``dtype``.

        Raises:
            UnknownNameError, BackendUnavailableError: as :func:`gdn_jax.decode_step`.
        """
        return cls(
            backend=_backend(params, cfg, backend),
            rule=select_backend("prefill", cfg.gdn, backend="xla" if backend == "xla" else None),
            attention="xla" if cudnn_reason(cfg.head_dim, dtype) else "cudnn",
            narrow=dtype == jnp.bfloat16 and jax.devices()[0].platform == "gpu",
        )


PLAIN = Route()
"""Everything on XLA in float32."""


def cudnn_reason(width: int, dtype: Any) -> str | None:
    """Why ``jax.nn.dot_product_attention`` cannot run on cuDNN here; None when it can."""
    reason = device_reason()
    if reason:
        return reason
    if dtype != jnp.bfloat16:
        return f"keys are {jnp.dtype(dtype).name}; cuDNN's attention needs bfloat16"
    widest = max(w for since, w in CUDNN_WIDTHS.items() if capability() >= since)
    if width % 8 or width > widest:
        return f"heads are {width} wide; cuDNN's attention needs a multiple of 8 up to {widest}"
    return None


def _backend(params: ModelParams, cfg: ModelConfig, backend: str | None) -> str:
    weights = [matrix("a matrix of the model", w) for w in weights_of(params)]
    for block in params.blocks:
        if isinstance(block.mixer, GDNParams):
            weights += matrices(block.mixer)
    chosen = choose("decode_step", cfg.gdn, weights=weights, backend=backend, lays_out=False)
    return chosen.backend


def weights_of(params: ModelParams) -> list[Weight]:
    """The matrices of a model outside of its linear layers."""
    found: list[Weight] = [params.embedding if params.head is None else params.head]
    for block in params.blocks:
        found += [block.gate_proj, block.up_proj, block.down_proj]
        if isinstance(block.mixer, AttentionParams):
            mixer = block.mixer
            found += [mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj]
    return found


def products(x: Array, *weights: Weight, route: Route, rounded: bool = False) -> tuple[Array, ...]:
    """``w·x`` for every weight: x [B, T, D] -> float32 [B, T, N] each.

    Where operands are rounded to bfloat16, results are too if ``rounded``, and of that type.

    One token a row on the kernels is one launch for all weights.
    """
    B, T, D = x.shape
    if T > 1 or route.backend == "xla":
        narrow = T > 1 and route.narrow
        return tuple(project(x, Rounded(w, rounded) if narrow else w) for w in weights)
    found = joint.products(x.reshape(B, D), *map(as_read, weights))
    return tuple(y.reshape(B, T, -1) for y in found)


def as_read(w: Weight) -> Array:
    """A weight as the kernels read it."""
    assert not isinstance(w, Q4Array)
    return w.blocks if isinstance(w, Q4Kernel) else w


def sliced_product(x: Array, w: Weight) -> Array:
    """``w·x`` on the kernels as K slices, to be added in order: [B, D] -> [splits, B, N]."""
    read = as_read(w)
    return q4_gemv.gemv_parts(x, read) if is_int4(read) else float_gemv.gemv(x, read)[None]
