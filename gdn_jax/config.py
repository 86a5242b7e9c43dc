"""The shape of a Gated DeltaNet layer, and the shapes of public models."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gdn_jax.errors import ConfigError

LINEAR, FULL = "linear_attention", "full_attention"
"""The kinds of layers, as Hugging Face names them."""

DEFAULT_INTERVAL = 4
"""One layer in this many is full attention, unless a file says otherwise."""

HF_FIELDS = {
    "d_model": "hidden_size",
    "num_k_heads": "linear_num_key_heads",
    "num_v_heads": "linear_num_value_heads",
    "head_k_dim": "linear_key_head_dim",
    "head_v_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
    "norm_eps": "rms_norm_eps",
}
"""The Hugging Face setting behind each field of a :class:`GDNConfig`."""


@dataclasses.dataclass(frozen=True)
class GDNConfig:
    """Sizes of one Gated DeltaNet layer; frozen and hashable, a static argument under jit.

    The symbols are those of :mod:`gdn_jax.types`: ``d_model`` D, ``num_k_heads`` HK,
    ``num_v_heads`` HV (a multiple of HK), ``head_k_dim`` K, ``head_v_dim`` V,
    ``conv_width`` W (at least 2); ``norm_eps`` is added under the root of the gated RMSNorm.
    Nothing requires K = V.

    Raises:
        ConfigError: a size that is not a positive integer, HV not a multiple of HK,
            W below 2, or an epsilon that is not a positive finite number.
    """

    d_model: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "norm_eps":
                number = isinstance(value, int | float) and not isinstance(value, bool)
                ok = number and math.isfinite(value) and value > 0
                needed = "a positive finite number"
            else:
                ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
                needed = "a positive integer"
            if not ok:
                raise ConfigError(f"GDNConfig: {field.name} is {value!r}; needed {needed}")
        if self.num_v_heads % self.num_k_heads:
            raise ConfigError(
                f"GDNConfig: num_v_heads is {self.num_v_heads}; needed a multiple of "
                f"num_k_heads = {self.num_k_heads}"
            )
        if self.conv_width < 2:
            raise ConfigError(f"GDNConfig: conv_width is {self.conv_width}; needed at least 2")

    @property
    def key_dim(self) -> int:
        """HK·K, the width of q and of k."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """HV·V, the width of v, of z and of the output projection's input."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """C = 2·HK·K + HV·V, the convolved channels."""
        return 2 * self.key_dim + self.value_dim

    @property
    def heads_per_key(self) -> int:
        """HV // HK, the value heads that share one key head."""
        return self.num_v_heads // self.num_k_heads

    @classmethod
    def from_hf(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> Self:
        """Read the layer's sizes from a Hugging Face configuration.

        Args:
            config: a ``config.json``, the directory that holds one, or the parsed mapping;
                a ``text_config`` inside it is used when present.

        Raises:
            ConfigError: no such file, not JSON, or a field missing or out of range.
        """
        raw, origin = read_hf(config)
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ConfigError(f"{origin}: text_config is {type(text).__name__}; needed an object")
        missing = [name for name in HF_FIELDS.values() if name not in text]
        if missing:
            raise ConfigError(
                f"{origin}: no {', '.join(missing)}; needed for a Gated DeltaNet layer"
            )
        return cls(**{ours: text[theirs] for ours, theirs in HF_FIELDS.items()})


def read_hf(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The parsed config.json of a mapping, a file or its directory, and its name in messages.

    Raises:
        ConfigError: no such file, or no JSON object.
    """
    if isinstance(config, Mapping):
        return config, "config"
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; needed a Hugging Face config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as JSON ({error}); needed a JSON object"
        ) from None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: holds a {type(raw).__name__}; needed a JSON object")
    return raw, str(path)


PRESETS: dict[str, GDNConfig] = {
    "qwen3.5-27b": GDNConfig(5120, 16, 48, 128, 128),
    "qwen3.5-9b": GDNConfig(4096, 16, 32, 128, 128),
    "qwen3-next-80b-a3b": GDNConfig(2048, 16, 32, 128, 128),
    "tiny": GDNConfig(64, 2, 4, 16, 8),
    "tiny-wide": GDNConfig(96, 2, 6, 8, 16),
}
"""Public shapes, and two small ones with K ≠ V and HV ≠ HK for tests and notebooks."""
