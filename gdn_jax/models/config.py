"""Sizes of a dense Qwen3.5 text model, from its config.json; unknown settings are refused."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Self

from gdn_jax.checkpoints.hf_layer import layer_types_of
from gdn_jax.config import FULL, HF_FIELDS, LINEAR, PRESETS, GDNConfig, read_hf
from gdn_jax.errors import ConfigError

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "output_gate_type": ("swish", "silu"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attn_output_gate": (True,),
    "mlp_only_layers": ([],),
}
"""Settings of which only one value is supported; an absent setting means that value."""
_WITHOUT_EFFECT = {
    *("architectures", "attention_dropout", "bos_token_id", "cache_implementation", "chunk_size"),
    *("dtype", "eos_token_id", "full_attention_interval", "initializer_range", "layer_types"),
    *("mamba_ssm_dtype", "max_position_embeddings", "model_type", "mtp_num_hidden_layers"),
    *("mtp_use_dedicated_embeddings", "num_hidden_layers", "pad_token_id", "partial_rotary_factor"),
    *("rms_norm_eps", "rope_parameters", "rope_theta", "tie_word_embeddings", "torch_dtype"),
    *("transformers_version", "use_cache"),
}
_ROPE = {"mrope_interleaved", "mrope_section", "partial_rotary_factor", "rope_theta", "rope_type"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model: ``gdn`` those of linear layers, ``layer_types`` the kind of every layer.

    Rotary positions turn the first ``rotary_dim`` of the ``head_dim`` numbers of a head.
    """

    gdn: GDNConfig
    layer_types: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    tied: bool

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ConfigError(f"ModelConfig: {name} is {size!r}; needed a positive integer")
        if self.num_attention_heads % self.num_key_value_heads:
            found, needed = self.num_attention_heads, self.num_key_value_heads
            raise ConfigError(f"ModelConfig: {found} query heads; needed a multiple of {needed}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            found, needed = self.rotary_dim, f"an even number up to head_dim = {self.head_dim}"
            raise ConfigError(f"ModelConfig: rotary_dim is {found}; needed {needed}")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers, in order."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers with full attention, in order."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @classmethod
    def from_hf(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> Self:
        """Read a Hugging Face configuration; its ``text_config`` where there is one.

        Raises:
            ConfigError: no such file, a field that is missing or out of range, another
                architecture, or a setting that this package does not know.
        """
        raw, origin = read_hf(config)
        text = raw.get("text_config", raw)
        kind = text.get("model_type", raw.get("model_type"))
        if kind not in _MODEL_TYPES:
            needed = " or ".join(_MODEL_TYPES)
            raise ConfigError(f"{origin}: model_type is {kind!r}; needed {needed}, a dense model")
        missing = [name for name in _SIZES if name not in text]
        if missing:
            raise ConfigError(f"{origin}: no {', '.join(missing)}; needed for a Qwen3.5 model")
        _refuse_unknown(origin, text)
        rope = text.get("rope_parameters") or {}
        factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        return cls(
            gdn=GDNConfig.from_hf(config),
            layer_types=layer_types_of(text, origin),
            **{name: text[name] for name in _SIZES},
            rotary_dim=int(text["head_dim"] * factor),
            rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e7))),
            norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            tied=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        )


def _refuse_unknown(origin: str, text: Mapping[str, Any]) -> None:
    for name, needed in _ONLY.items():
        if name in text and text[name] not in needed:
            raise ConfigError(f"{origin}: {name} is {text[name]!r}; needed {needed[0]!r}")
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{origin}: rope_type is {rope['rope_type']!r}; needed 'default'")
    known = _WITHOUT_EFFECT | {*_SIZES, *_ONLY, *HF_FIELDS.values()}
    strange = sorted(name for name in text if name not in known)
    strange += sorted(f"rope_parameters.{name}" for name in rope if name not in _ROPE)
    if strange:
        raise ConfigError(f"{origin}: unknown settings {', '.join(strange)}")


def _qwen35(
    gdn: GDNConfig, layers: int, mlp: int, heads: int, key_heads: int, *, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        gdn=gdn,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * (layers // 4),
        vocab_size=248320,
        hidden_size=gdn.d_model,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        norm_eps=1e-6,
        tied=tied,
    )


MODEL_PRESETS: dict[str, ModelConfig] = {
    "qwen3.5-27b": _qwen35(PRESETS["qwen3.5-27b"], 64, 17408, 24, 4),
    "qwen3.5-9b": _qwen35(PRESETS["qwen3.5-9b"], 32, 12288, 16, 4),
    "qwen3.5-0.8b": _qwen35(GDNConfig(1024, 16, 16, 128, 128), 24, 3584, 8, 2, tied=True),
}
"""Shapes of public dense models, by the names of their configurations."""
