# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From tokens to text, and what is carried on the way
#
# A whole Qwen3.5 model: an embedding, blocks of two kinds, a head. Three blocks of four keep a
# **state** of fixed size, the Gated DeltaNet layers of the other pages; the fourth is attention and
# keeps **keys and values** of every token. This page follows a prompt through the small checkpoint
# that comes with the repository, then counts what each kind carries as the text grows, for the
# real 27B model.
#
# The small checkpoint was written by `transformers` with random weights. Its text is nonsense, and
# will stay so; everything else is as in a trained one.

# %%
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from gdn_jax.models import load
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.config import MODEL_PRESETS
from gdn_jax.models.generation.stopping import StopStrings

INK, BLUE, ORANGE, GREEN = "#7a7a7a", "#3f8fe0", "#e08214", "#2fa56a"
INKED = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]
plt.rcParams.update(dict.fromkeys(INKED, INK))
plt.rcParams.update({"figure.facecolor": "none", "axes.facecolor": "none", "figure.dpi": 110})
plt.rcParams.update({"legend.framealpha": 0.0, "axes.titlesize": "medium"})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

model = load(Path("../gdn_jax/data/tiny_qwen35"), weights="f32")
print("layers:", ", ".join(kind.split("_")[0] for kind in model.cfg.layer_types))
print("parameters:", f"{sum(x.size for x in jax.tree.leaves(model.params)):,}")

# %% [markdown]
# ## Tokens
#
# The tokenizer is byte-level BPE: text becomes bytes, and pairs of neighbours that occur in its
# list are joined. A letter beyond ASCII is two bytes or more, and may be spread over tokens, so a
# token alone need not be text. While tokens come, bytes are held back until they are a letter.

# %%
prompt = "the café on the corner,"
tokenizer = model.tokenizer
ids = tokenizer.encode(prompt)
print(len(prompt), "letters,", len(prompt.encode()), "bytes,", len(ids), "tokens")
print([tokenizer.decode([i]) for i in ids])

stream = tokenizer.stream()
halves = [*tokenizer.encode("caf"), 96, 99, *tokenizer.encode(" ö")]
print("one by one:", [tokenizer.decode([i]) for i in halves])
print("streamed:  ", pieces := [stream.push(i) for i in halves])
assert "".join(pieces) + stream.finish() == tokenizer.decode(halves)

# %% [markdown]
# ## One token
#
# The model gives a number for each of the 128 tokens that could come next; the softmax of those is
# a probability. Greedy decoding takes the largest. A **temperature** divides the numbers first: the
# choice is drawn, sharper below 1 and flatter above.

# %%
logits = np.asarray(model.logits([ids])[0, -1], np.float64)


def probabilities(temperature):
    x = logits / temperature
    p = np.exp(x - x.max())
    return p / p.sum()


order = np.argsort(-logits)[:24]
fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
for temperature, color in ((0.5, BLUE), (1.0, ORANGE), (2.0, GREEN)):
    p = probabilities(temperature)
    bits = -np.sum(p * np.log2(p))
    ax.plot(p[order], "o-", ms=4, color=color, label=f"temperature {temperature}: {bits:.1f} bits")
ax.set_xticks(range(len(order)), [repr(tokenizer.decode([i]))[1:-1] for i in order])
ax.set(xlabel="next token", ylabel="probability", title=f"after {prompt!r}")
ax.legend()
plt.show()

# %% [markdown]
# ## Many tokens
#
# Generation puts the chosen token behind the prompt and asks again. Nothing of the prompt is
# computed again: the states and the keys and values of all tokens so far are in the cache. Here
# both ways, the whole text anew for every token and the cache; they choose the same.

# %%
text = list(ids)
for _ in range(8):
    padded = text + [0] * (len(ids) + 8 - len(text))
    text.append(int(np.argmax(model.logits([padded])[0, len(text) - 1])))
(found,) = model.generate([ids], max_new_tokens=8, stop_tokens=())
print("anew each time:", text[len(ids) :])
print("with the cache:", found.tokens)
assert found.tokens == text[len(ids) :]

# %% [markdown]
# Padding behind a token changes nothing for it: no block looks ahead. That is why the loop above
# could run at one length, for which it is compiled once.
#
# A seed makes drawing repeatable, and a stop string ends a text wherever its tokens lie. Text that
# may still become one is held back:

# %%
options = dict(max_new_tokens=24, temperature=1.0, top_p=0.95, seed=4, stop_tokens=())
(first,), (second,) = (model.generate([ids], **options) for _ in range(2))
print(repr(first.text), "and again:", first.tokens == second.tokens)
assert first.tokens == second.tokens

stop = StopStrings(["\n\n", "END"])
print([stop.push(piece) for piece in ("one E", "N", "ough, E", "ND and more")], "found", stop.found)

# %% [markdown]
# ## What is carried
#
# A linear layer carries $S$, a matrix of 128 x 128 numbers for each of 48 heads, and three frames
# of its convolution: the same at token 10 and at token 100 000. An attention layer carries a key
# and a value of 256 numbers for each of 4 heads, for every token. The 27B model has 48 layers of
# the one kind and 16 of the other. The sizes come from its configuration; no array is made.

# %%
cfg = MODEL_PRESETS["qwen3.5-27b"]


def carried(tokens):
    """Bytes of states and of keys and values of one sequence."""
    cache = jax.eval_shape(lambda: ModelCache.zeros(cfg, 1, tokens, jnp.bfloat16))
    size = {
        part: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(getattr(cache, part)))
        for part in ("states", "k", "v")
    }
    return size["states"], size["k"] + size["v"]


state, token = carried(1)
full = token * len(cfg.layer_types) // len(cfg.full_layers)
print(f"states, at any length: {state / 2**20:.1f} MiB")
print(f"keys and values:       {token / 2**10:.0f} KiB a token")
print(f"as much as the states: after {state // token + 1} tokens")
print(f"less than 64 layers of attention: from {state // (full - token) + 1} tokens on")
assert carried(1000) == (state, 1000 * token)

contexts = np.logspace(1, np.log10(262144), 60)
fig, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
ax.plot(contexts, full * contexts / 2**30, "--", color=INK, label="if all 64 layers were attention")
ax.plot(contexts, (state + token * contexts) / 2**30, color=GREEN, lw=2.5, label="this model")
ax.plot(contexts, token * contexts / 2**30, color=ORANGE, label="of it: keys and values, bfloat16")
ax.plot(contexts, np.full(60, state / 2**30), color=BLUE, label="of it: states, float32")
ax.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="GiB for one sequence")
ax.set_title("27B: what one sequence carries")
ax.legend()
plt.show()

# %% [markdown]
# Below some 2400 tokens the states are the larger part, and a sequence of less than 800 carries
# more than it would if all layers were attention. Far beyond, what is left is a quarter of the keys
# and values.
#
# For time the same picture holds: each token reads all of what is carried once. Beside it stand the
# weights, which a batch shares and which int4 makes small:

# %%
weights = {"bfloat16": 2.0, "int4": 18 / 32}
shape = cfg.gdn
linear = (shape.conv_dim + 2 * shape.value_dim) * shape.d_model
attention = (3 * cfg.num_attention_heads + 2 * cfg.num_key_value_heads) * cfg.head_dim
mlp = 3 * cfg.intermediate_size
mixers = len(cfg.linear_layers) * linear + len(cfg.full_layers) * attention * cfg.hidden_size
numbers = mixers + (len(cfg.layer_types) * mlp + cfg.vocab_size) * cfg.hidden_size
print(f"large matrices: {numbers / 1e9:.1f}e9 numbers")
print("\nGiB read for a token" + " " * 6, *(f"{n:>9,}" for n in (100, 10_000, 100_000)), "tokens")
for name, size in weights.items():
    reads = [(numbers * size + state + token * n) / 2**30 for n in (100, 10_000, 100_000)]
    print(f"  {name:24s}", *(f"{x:9.2f}" for x in reads))
