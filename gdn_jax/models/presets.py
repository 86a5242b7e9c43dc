"""The shapes of public dense Qwen3.5 models."""

from gdn_jax.config import FULL, LINEAR, PRESETS, GDNConfig
from gdn_jax.models.config import ModelConfig


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
"""By the names of their public configurations."""
