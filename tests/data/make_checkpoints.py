"""Writes tests/data/checkpoints: tiny models saved by ``transformers``, with what they compute.

Run in an environment with torch 2.9 or later and transformers 5.17 (gdn_jax is not needed)::

    python tests/data/make_checkpoints.py

Each directory holds a config.json, the weights, and ``expected.safetensors``: inputs ``xs``
[B, T, D] of one linear-attention layer, its outputs in float32 over all tokens at once
(``ys_one_shot``) and token by token (``ys_cached``), and the last recurrent state ``S``
[B, HV, K, V] and convolution window ``window`` [B, C, W] of the second run. The weights it uses
are read back from the saved directory.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file

ROOT = Path(__file__).parent / "checkpoints"
LAYER, BATCH, TOKENS = 2, 2, 6

TEXT = dict(
    vocab_size=16,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    initializer_range=0.2,
    linear_conv_kernel_dim=4,
)
VISION = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=24)
EXPERTS = dict(
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
)


def sizes(D: int, HK: int, HV: int, K: int, V: int) -> dict[str, int]:
    return dict(
        hidden_size=D,
        linear_num_key_heads=HK,
        linear_num_value_heads=HV,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
    )


def linear_layers(model: Any) -> dict[int, Any]:
    modules = model.named_modules()
    return {m.layer_idx: m for name, m in modules if name.endswith(".linear_attn")}


def randomise(model: Any) -> None:
    """Trained ranges for what ``transformers`` initialises to ones."""
    for module in linear_layers(model).values():
        dt = torch.empty_like(module.dt_bias).uniform_(1e-3, 1e-1)
        module.dt_bias.data = dt + torch.log(-torch.expm1(-dt))
        module.norm.weight.data = 1 + 0.1 * torch.randn_like(module.norm.weight)


def keep_float32(model: Any) -> None:
    """A_log and the norm weight float32 in a half-precision file, as published models have them."""
    for module in linear_layers(model).values():
        module.A_log.data = torch.empty_like(module.A_log, dtype=torch.float32).uniform_(-4, 2.7)
        module.norm.weight.data = 1 + 0.1 * torch.randn(module.norm.weight.shape)


def write_expected(path: Path, model_class: Any) -> None:
    model = model_class.from_pretrained(path, dtype=torch.float32).eval()
    module = linear_layers(model)[LAYER]
    xs = torch.randn(BATCH, TOKENS, module.hidden_size)
    cache = transformers.DynamicCache(config=model.config.get_text_config())
    with torch.no_grad():
        one_shot = module(xs)
        cached = [module(xs[:, t : t + 1], cache_params=cache) for t in range(TOKENS)]
    expected = {
        "xs": xs,
        "ys_one_shot": one_shot,
        "ys_cached": torch.cat(cached, dim=1),
        "S": cache.layers[LAYER].recurrent_states[0],
        "window": cache.layers[LAYER].conv_states[0],
    }
    written_by = (
        f"layer {LAYER}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    contiguous = {name: x.contiguous() for name, x in expected.items()}
    save_file(contiguous, path / "expected.safetensors", {"written_by": written_by})


def write_text() -> None:
    config = transformers.Qwen3_5TextConfig(**TEXT, **sizes(32, 2, 4, 8, 12))
    model = transformers.Qwen3_5ForCausalLM(config)
    randomise(model)
    model.to(torch.bfloat16)
    keep_float32(model)
    model.save_pretrained(ROOT / "qwen3_5-text")
    write_expected(ROOT / "qwen3_5-text", transformers.Qwen3_5ForCausalLM)


def write_sharded() -> None:
    config = transformers.Qwen3_5Config(
        text_config=TEXT | sizes(24, 2, 6, 8, 4),
        vision_config=VISION | dict(patch_size=4, num_position_embeddings=4),
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    randomise(model)
    model.save_pretrained(ROOT / "qwen3_5-sharded", max_shard_size="40KB")
    write_expected(ROOT / "qwen3_5-sharded", transformers.Qwen3_5ForConditionalGeneration)


def write_next() -> None:
    """The published Qwen3-Next configurations have ``full_attention_interval`` alone."""
    config = transformers.Qwen3NextConfig(
        **TEXT, **EXPERTS, **sizes(24, 3, 6, 8, 10), full_attention_interval=2
    )
    model = transformers.Qwen3NextForCausalLM(config)
    randomise(model)
    model.to(torch.float16).save_pretrained(ROOT / "qwen3_next")
    file = ROOT / "qwen3_next" / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    del raw["layer_types"]
    raw["full_attention_interval"] = 2
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    write_expected(ROOT / "qwen3_next", transformers.Qwen3NextForCausalLM)


def main() -> None:
    shutil.rmtree(ROOT, ignore_errors=True)
    for seed, write in enumerate((write_text, write_sharded, write_next)):
        torch.manual_seed(seed)
        write()
    for file in ROOT.glob("*/generation_config.json"):
        file.unlink()


if __name__ == "__main__":
    main()
