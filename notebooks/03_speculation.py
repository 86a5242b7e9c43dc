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
# # Speculation: draft, check, take back
#
# A cheap model guesses a few tokens ahead, the real one checks them together, and the longest
# right prefix is kept. With attention a wrong guess is undone by forgetting the end of the cache.
# A Gated DeltaNet layer has **one state that every token overwrites**: once four tokens have gone
# through it, nothing in it says what it was after two. So the layer has to keep something that lets
# it go back. This page shows what, what it costs, and that nothing of a rejected token remains.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import gdn_jax as gdn

INK, BLUE, ORANGE = "#7a7a7a", "#3f8fe0", "#e08214"
INKED = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]
plt.rcParams.update(dict.fromkeys(INKED, INK))
plt.rcParams.update({"figure.facecolor": "none", "axes.facecolor": "none", "figure.dpi": 110})
plt.rcParams.update({"legend.framealpha": 0.0, "axes.titlesize": "medium"})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

cfg = gdn.GDNConfig(64, num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32)
bank = gdn.LayerBank(cfg, 1).preload(0, gdn.init_params(jax.random.key(0), cfg))
rng = np.random.default_rng(0)
vocabulary = jnp.asarray(rng.normal(size=(10, cfg.d_model)), jnp.float32)

# %% [markdown]
# ## Slots
#
# States live in the slots of a pool. Here two sequences have four tokens each behind them.

# %%
pool, slots = gdn.StatePool.create(cfg, num_layers=1, num_slots=4).alloc(2)
step = jax.jit(lambda pool, x: bank.step_slots(pool, 0, x, slots))
for token in range(4):
    y, pool = step(pool, vocabulary[jnp.array([token, token + 4])])
print(f"{pool.occupancy} of {pool.num_slots} slots in use, {pool.nbytes / 1024:.0f} KiB")

# %% [markdown]
# ## A draft does not touch the pool
#
# Six draft tokens for each sequence. `draft_slots` returns the outputs of all of them, which the
# model needs to judge the guesses, and a record. The pool is the same as before.

# %%
TD = 6
guesses = vocabulary[jnp.asarray(rng.integers(0, 10, (2, TD)))]
draft = jax.jit(
    lambda pool, xs, scheme: bank.draft_slots(pool, 0, xs, slots, scheme=scheme),
    static_argnames="scheme",
)
ys, record = draft(pool, guesses, scheme="snapshot")
print("outputs", ys.shape, "- state after token 3 is", record.S[2].shape, "in the record")

# %% [markdown]
# ## A commit is what serial decoding would have left
#
# Say the first sequence's guesses were right up to the third, and the second's first was wrong.
# The slots move on by three tokens and by none, and the result equals decoding those tokens one by
# one **in every bit**. Nothing of the other nine guesses remains, even if they were not finite.

# %%
commit = jax.jit(lambda pool, record, n: pool.commit({0: record}, slots, n))
after = commit(pool, record, jnp.array([3, 0], jnp.int32))

serial = pool
one = jax.jit(lambda pool, x, s: bank.step_slots(pool, 0, x, s))
for t in range(3):
    _, serial = one(serial, guesses[:, t], jnp.array([slots[0], -1], jnp.int32))
for name in ("S", "conv_hist"):
    print(name, "equal in every bit:", bool((getattr(after, name) == getattr(serial, name)).all()))

# %% [markdown]
# ## Two ways to go back
#
# - **snapshot** keeps $S$ after every draft token: $4\,T_d\,H_V K V$ bytes a sequence and layer.
#   A commit copies one of them.
# - **replay** keeps what the delta rule was fed, $q, k, v, g, \beta$:
#   $4\,T_d\,(2 H_K K + H_V V + 2 H_V)$ bytes. A commit runs the rule again over what was accepted.
#
# For a layer of the 27B model (16 key and 48 value heads of 128) a token's snapshot is 3.1 MB and
# its operands are 41 KB.


# %%
def megabytes(cfg, tokens, scheme):
    keys, values = cfg.num_k_heads * cfg.head_k_dim, cfg.num_v_heads * cfg.head_v_dim
    state = cfg.num_v_heads * cfg.head_k_dim * cfg.head_v_dim
    floats = state if scheme == "snapshot" else 2 * keys + values + 2 * cfg.num_v_heads
    return 4 * tokens * floats / 1e6


big = gdn.PRESETS["qwen3.5-27b"]
lengths = np.arange(1, 17)
fig, ax = plt.subplots(figsize=(6, 3.2))
for scheme, colour in (("snapshot", BLUE), ("replay", ORANGE)):
    ax.plot(lengths, [48 * megabytes(big, n, scheme) for n in lengths], color=colour, label=scheme)
ax.set(xlabel="draft tokens", ylabel="MB", yscale="log", title="A record of all 48 layers, 27B")
ax.legend()
plt.show()

# %% [markdown]
# The record's own arrays follow the formulas (the convolution's inputs, which both schemes keep,
# are left out):

# %%
for scheme in ("snapshot", "replay"):
    _, kept = draft(pool, guesses, scheme=scheme)
    arrays = jax.tree.leaves((kept.S, kept.operands))
    print(f"{scheme:9s}{sum(x.nbytes for x in arrays) / 1e6:7.3f} MB,"
          f" formula {2 * megabytes(cfg, TD, scheme):.3f}")  # fmt: skip

# %% [markdown]
# ## What a commit costs in time
#
# Replay runs the rule over all draft tokens whatever was accepted (a mask keeps the shapes fixed),
# so on this machine's CPU its commit takes longer; how much, depends on the machine. The draft
# itself is the same work in both. Time does not depend on how many tokens were accepted.


# %%
def milliseconds(scheme, n):
    _, kept = draft(pool, guesses, scheme=scheme)
    accepted = jnp.full(2, n, jnp.int32)
    jax.block_until_ready(commit(pool, kept, accepted))
    times = []
    for _ in range(30):
        start = time.perf_counter()
        jax.block_until_ready(commit(pool, kept, accepted))
        times.append(1e3 * (time.perf_counter() - start))
    return np.median(times)


fig, ax = plt.subplots(figsize=(6, 3.2))
for scheme, colour in (("snapshot", BLUE), ("replay", ORANGE)):
    times = [milliseconds(scheme, n) for n in range(TD + 1)]
    ax.plot(range(TD + 1), times, "o-", color=colour, label=scheme)
ax.set(xlabel="accepted tokens", ylabel="ms", ylim=(0, None), title="One commit, two sequences")
ax.legend()
plt.show()

# %% [markdown]
# ## A tree of guesses
#
# Several continuations share a beginning: every token names its parent, `-1` is the slot's own
# state. A commit takes the path to one node; the number is the node's index plus one.
#
# ```
# state ─ 0 ─┬─ 1 ── 3
#            └─ 2 ─┬─ 4
#                  └─ 5
# ```

# %%
parents = jnp.array([[-1, 0, 0, 1, 2, 2]] * 2, jnp.int32)
_, record = bank.draft_slots(pool, 0, guesses, slots, parents=parents, scheme="replay")
after = commit(pool, record, jnp.array([5, 0], jnp.int32))  # node 4: tokens 0, 2, 4

serial = pool
for t in (0, 2, 4):
    _, serial = one(serial, guesses[:, t], jnp.array([slots[0], -1], jnp.int32))
print("the path 0, 2, 4:", "equal" if (after.S == serial.S).all() else "different", "to serial")
