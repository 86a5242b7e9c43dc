"""Makes ``tiny_qwen35``: a small checkpoint by transformers and its logits; needs torch.

    python tests/data/make_tiny_qwen35.py gdn_jax/data/tiny_qwen35

``expected.npz`` has 134 token ids and their logits: of the first 70 at once, then one by one; and
``greedy``, the 64 most likely tokens one after the other behind the first 70; and ``hidden``
[5, 70, 32], what goes into every layer then and what comes out of the last one.
make_tiny_tokenizer.py adds a tokenizer.
"""

import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

PROMPT, TOKENS = 70, 134


def main(folder: str) -> None:
    """Write the checkpoint and what it computes."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
        },
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
            if name.endswith("dt_bias"):
                weight.uniform_(-4, -1)
            if name.endswith("A_log"):
                weight.uniform_(-2, 2)
        model.save_pretrained(folder)
        ids = torch.randint(0, config.vocab_size, (1, TOKENS))
        out = model(ids[:, :PROMPT], use_cache=True)
        logits = [out.logits[0]]
        for t in range(PROMPT, TOKENS):
            cache = out.past_key_values
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits[0])
        layers, hidden = model.model.layers, []
        hooks = [
            layer.register_forward_pre_hook(lambda _, x: hidden.append(x[0])) for layer in layers
        ]
        hooks.append(layers[-1].register_forward_hook(lambda _, x, y: hidden.append(y)))
        out, greedy = model(ids[:, :PROMPT], use_cache=True), []
        for hook in hooks:
            hook.remove()
        for _ in range(PROMPT, TOKENS):
            greedy.append(out.logits[0, -1].argmax())
            step = greedy[-1].reshape(1, 1)
            out = model(step, past_key_values=out.past_key_values, use_cache=True)
    greedy = torch.stack(greedy).numpy().astype(np.int32)
    hidden = torch.cat(hidden).numpy()
    ids, logits = ids[0].numpy().astype(np.int32), torch.cat(logits).float().numpy()
    known = dict(ids=ids, logits=logits, greedy=greedy, hidden=hidden)
    np.savez_compressed(f"{folder}/expected.npz", **known)


if __name__ == "__main__":
    main(sys.argv[1])
