"""The weights of a model in a Hugging Face directory; all are checked before any is read."""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np

from gdn_jax.checkpoints.hf_layer import HF_TENSORS
from gdn_jax.checkpoints.safetensors_dir import STORED, Header, TensorFiles
from gdn_jax.config import LINEAR, read_hf
from gdn_jax.errors import CheckpointError
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.loading.stored import Stored
from gdn_jax.models.loading.weights import WeightSpec, refuse_faults, summary

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_PREFIXES = ("model.language_model.", "model.")
_NAMES = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
_SKIPPED = {
    "model.visual.": "vision",
    "visual.": "vision",
    "mtp.": "multi-token prediction",
    "model.mtp.": "multi-token prediction",
}


@dataclasses.dataclass(frozen=True)
class HFModel:
    """A directory and its configuration."""

    path: Path
    cfg: ModelConfig

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read config.json.

        Raises:
            CheckpointError: no such directory, or quantised weights.
            ConfigError: no config.json, another architecture, or settings that are not known.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; needed a Hugging Face checkpoint")
        raw, origin = read_hf(path)
        cfg = ModelConfig.from_hf(path)
        if raw.get("quantization_config"):
            raise CheckpointError(
                f"{origin}: quantization_config is set; needed float32, bfloat16 or float16 "
                "weights, which weights='q4' quantises on the way in"
            )
        return cls(path, cfg)

    def find(self, table: Mapping[str, WeightSpec]) -> tuple[dict[str, Stored], str]:
        """Every weight of the table by name, and a line on what the files hold and what is skipped.

        Raises:
            CheckpointError: shards missing or truncated; or all tensors at once that are missing,
                unexpected, or of another shape or type.
        """
        files = TensorFiles.open(self.path)
        found = files.headers()
        prefix = next((p for p in _PREFIXES if p + _EMBEDDING in found), _PREFIXES[-1])
        wanted = {name: self._stored_name(name, prefix) for name in table}
        left = found.keys() - wanted.values()
        skipped = {name: why for name in left if (why := self._why_skipped(name))}
        wrong, other = [], []
        for name, theirs in wanted.items():
            header, shape = found.get(theirs), _stored_shape(name, table[name])
            if header and header.shape != shape:
                wrong.append(f"{theirs} is {list(header.shape)}, needed {list(shape)}")
            if header and header.dtype not in STORED:
                other.append(f"{theirs} is {header.dtype}, needed {', '.join(STORED)}")
        refuse_faults(
            str(files.source),
            {
                "missing": wanted.values() - found.keys(),
                "unexpected": left - skipped.keys(),
                "of another shape": wrong,
                "of another type": other,
            },
        )
        stored = {name: _stored(n, found[n]) for name, n in wanted.items()}
        return stored, summary(self.path, stored, Counter(skipped.values()))

    def _stored_name(self, name: str, prefix: str) -> str:
        if name == "embedding":
            return prefix + _EMBEDDING
        if name == "head":
            return _HEAD
        if name == "norm":
            return f"{prefix}norm.weight"
        _, layer, name = name.split(".", 2)
        if not name.startswith("mixer."):
            theirs = f"{_NAMES[name]}.weight"
        elif self.cfg.layer_types[int(layer)] == LINEAR:
            theirs = f"linear_attn.{HF_TENSORS[name.removeprefix('mixer.')]}"
        else:
            theirs = f"self_attn.{name.removeprefix('mixer.')}.weight"
        return f"{prefix}layers.{layer}.{theirs}"

    def _why_skipped(self, name: str) -> str | None:
        if self.cfg.tied and name == _HEAD:
            return "a head that is the embedding"
        return next((why for start, why in _SKIPPED.items() if name.startswith(start)), None)


def _stored_shape(name: str, weight: WeightSpec) -> tuple[int, ...]:
    if name.endswith(".conv_weight"):
        return (weight.shape[0], 1, weight.shape[1])
    return weight.shape


def _stored(name: str, header: Header) -> Stored:
    flat = (math.prod(header.shape[1:]),) if len(header.shape) > 1 else ()

    def rows(a: int, b: int) -> np.ndarray:
        return header.rows(a, b).reshape(b - a, *flat)

    return Stored(str(header.path), name, header.nbytes, rows)
