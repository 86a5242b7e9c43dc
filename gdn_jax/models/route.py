"""How a model runs: which kernels, which attention, how wide the products are. Chosen once."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from gdn_jax._core.backend import capability, choose, device_reason, select_backend
from gdn_jax.layer.pallas import matrices
from gdn_jax.layer.params import GDNParams
from gdn_jax.models import kernels
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.params import AttentionParams, ModelParams
from gdn_jax.quant.kernel_layout import matrix
from gdn_jax.quant.project import Rounded, Weight, project
from gdn_jax.types import Array

CUDNN_WIDTHS = {(8, 0): 128, (9, 0): 256}
"""Compute capabilities, and the widest heads that cuDNN's attention takes from each on."""


@dataclasses.dataclass(frozen=True)
class Route:
    """How a model runs: static, and the same for all of its calls.

    One token a row runs on ``backend``: the kernels (``"pallas"``) or XLA. More tokens run on XLA,
    except the delta rule, which runs on ``rule``; with ``narrow`` the operands of products are
    rounded to bfloat16. ``attention`` is ``"cudnn"`` or ``"xla"``.
    """

    backend: str = "xla"
    rule: str = "xla"
    attention: str = "xla"
    narrow: bool = False

    @property
    def precision(self) -> str:
        """The ``precision`` of :func:`gdn_jax.prefill`."""
        return "bfloat16" if self.narrow else "float32"

    def reads_by_length(self, rows: int) -> bool:
        """Whether attention of one token a row takes cuDNN, which reads only the keys of the row.

        For a single row XLA is as fast up to 65 000 tokens, and longer rows were not compared; for
        eight rows of 10 000 tokens XLA is 1.4 times slower (H200).
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


class Call(NamedTuple):
    """The static part of a call; each different one compiles a program.

    ``reach`` is at least the length of every row after the call: attention reads only so many
    places of the cache; None reads all of it. ``fresh`` says that the cache is empty, so attention
    does not read it at all. ``logits`` asks for those of ``"all"`` tokens, or of each row's
    ``"last"``.
    """

    cfg: ModelConfig
    route: Route = PLAIN
    reach: int | None = None
    fresh: bool = False
    logits: Literal["all", "last"] = "all"


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
    """The matrices of a model outside its linear layers."""
    found: list[Weight] = [params.embedding if params.head is None else params.head]
    for block in params.blocks:
        found += [block.gate_proj, block.up_proj, block.down_proj]
        if isinstance(block.mixer, AttentionParams):
            mixer = block.mixer
            found += [mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj]
    return found


def products(x: Array, *weights: Weight, route: Route, rounded: bool = False) -> tuple[Array, ...]:
    """``w·x`` for every weight: x [B, T, D] -> float32 [B, T, N] each.

    Where operands are rounded to bfloat16 and ``rounded`` is true, results are bfloat16 instead.
    One token a row on the kernels takes one launch for all weights.
    """
    B, T, D = x.shape
    if T > 1 or route.backend == "xla":
        narrow = T > 1 and route.narrow
        return tuple(project(x, Rounded(w, rounded) if narrow else w) for w in weights)
    found = kernels.products(x.reshape(B, D), *weights)
    return tuple(y.reshape(B, T, -1) for y in found)
