"""The weights of a model by name: their shapes, how wide they are held, and where they go.

Names are paths in :class:`gdn_jax.models.params.ModelParams`, as ``blocks.3.mixer.out_proj``.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gdn_jax.config import LINEAR
from gdn_jax.errors import CheckpointError, UnknownNameError
from gdn_jax.layer.params import LARGE, GDNParams, param_dims
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.loading.stored import Stored
from gdn_jax.models.params import AttentionParams, BlockParams, ModelParams
from gdn_jax.quant.q4array import GROUP

WEIGHTS = ("bf16", "q4", "f32")
"""The widths in which the projections of a model may be held."""

BYTES = {"f32": 4.0, "bf16": 2.0, "q4": 18 / GROUP}
"""Bytes of one weight in each of them."""

_MOST_NAMES = 8


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A tensor of a model. ``role`` is ``projection``, ``embedding`` or ``small``."""

    shape: tuple[int, ...]
    role: str

    def held(self, weights: str) -> str:
        """How the tensor is held in a model of ``weights``: f32, bf16 or q4.

        - Projections, nearly all of a model's bytes, are held as ``weights`` says; but bf16 instead
          of q4 where the columns are not a multiple of 32, which int4 needs.
        - The embedding is never int4: one of its rows is the whole input of a token, and only that
          row is read for the token.
        - Small tensors are f32. Norms and convolution are under a thousandth of the bytes; the
          gates' b and a, A_log and dt_bias sit in the exponent of a decay that is applied again at
          every token.
        """
        if self.role == "small" or weights == "f32":
            return "f32"
        fits = self.role == "projection" and self.shape[-1] % GROUP == 0
        return "q4" if weights == "q4" and fits else "bf16"

    def nbytes(self, held: str) -> int:
        """Bytes on the device."""
        return int(math.prod(self.shape) * BYTES[held])


def check_weights(where: str, weights: str) -> None:
    """Raise UnknownNameError unless ``weights`` is one of :data:`WEIGHTS`."""
    if weights not in WEIGHTS:
        known = ", ".join(WEIGHTS)
        raise UnknownNameError(f"{where}: no weights {weights!r}; there are {known}")


def weight_table(cfg: ModelConfig) -> dict[str, WeightSpec]:
    """Every weight of a model, in the order of its forward pass; no ``head`` where it is tied."""
    D, rows = cfg.hidden_size, (cfg.vocab_size, cfg.hidden_size)
    table = {"embedding": WeightSpec(rows, "embedding")}
    for i, kind in enumerate(cfg.layer_types):
        table |= {f"blocks.{i}.{name}": weight for name, weight in _block(cfg, kind).items()}
    table["norm"] = WeightSpec((D,), "small")
    return table if cfg.tied else table | {"head": WeightSpec(rows, "projection")}


def _block(cfg: ModelConfig, kind: str) -> dict[str, WeightSpec]:
    D, F = cfg.hidden_size, cfg.intermediate_size
    H, G, A = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    norm = WeightSpec((D,), "small")
    if kind == LINEAR:
        mixer = {
            name: WeightSpec(tuple(n for _, n in dims), "projection" if name in LARGE else "small")
            for name, dims in param_dims(cfg.gdn).items()
        }
    else:
        shapes = {"q_proj": (2 * H * A, D), "k_proj": (G * A, D), "v_proj": (G * A, D)}
        mixer = {
            n: WeightSpec(s, "projection") for n, s in (shapes | {"o_proj": (D, H * A)}).items()
        }
        mixer |= {n: WeightSpec((A,), "small") for n in ("q_norm", "k_norm")}
    mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    return {
        "input_norm": norm,
        **{f"mixer.{name}": weight for name, weight in mixer.items()},
        "mlp_norm": norm,
        **{name: WeightSpec(shape, "projection") for name, shape in mlp.items()},
    }


def assemble(cfg: ModelConfig, arrays: Mapping[str, Any]) -> ModelParams:
    """The model of these arrays, by the names of :func:`weight_table`; ``head`` may be absent."""

    def block(i: int, kind: str) -> BlockParams:
        own = {n: arrays[f"blocks.{i}.{n}"] for n in _block(cfg, kind)}
        mixer = {n.removeprefix("mixer."): own.pop(n) for n in list(own) if n.startswith("mixer.")}
        make = GDNParams if kind == LINEAR else AttentionParams
        return BlockParams(mixer=make(**mixer), **own)

    blocks = tuple(block(i, kind) for i, kind in enumerate(cfg.layer_types))
    return ModelParams(arrays["embedding"], blocks, arrays["norm"], arrays.get("head"))


def refuse_faults(where: str, faults: Mapping[str, Iterable[str]]) -> None:
    """Raise one CheckpointError that lists everything wrong, kind by kind, if anything is."""
    lines = []
    for kind, found in faults.items():
        names = sorted(found)
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            lines.append(f"{len(names)} {kind} ({', '.join(names[:_MOST_NAMES])}{more})")
    if lines:
        raise CheckpointError(f"{where}: nothing loaded, tensors are {'; '.join(lines)}")


def summary(path: Path, stored: Mapping[str, Stored], skipped: Mapping[str, int]) -> str:
    """One line on what a checkpoint holds, and on what of it is skipped."""
    size = sum(x.nbytes for x in stored.values())
    line = f"{path}: {len(stored)} tensors, {size / 1e9:.3g} GB"
    parts = [f"{count} of {why}" for why, count in sorted(skipped.items()) if count]
    return f"{line}; skipped: {', '.join(parts)}" if parts else line
