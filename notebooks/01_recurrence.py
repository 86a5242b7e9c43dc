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
# # The gated delta rule: one head by hand, then the layer
#
# Softmax attention keeps every key and value it has seen and searches them for each query. A Gated
# DeltaNet head keeps one matrix $S$ with $K$ rows and $V$ columns, whatever the length of the text.
# Each token changes $S$ and reads from it:
#
# $$
# \begin{aligned}
# S' &= e^{g} S && \text{forget a little} \\
# \delta &= \beta\,(v - S'^{\top} k) && \text{what the key does not yet read back} \\
# S &\leftarrow S' + k\,\delta^{\top} && \text{write it} \\
# o &= S^{\top} q && \text{read with the query}
# \end{aligned}
# $$
#
# The key $k$ has unit length. The two scalars belong to the token and the head: $g \le 0$ is the
# **log decay** and $\beta \in [0, 1]$ the **writing strength**.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.report.metrics import distance, unequal, worst_head

INK, BLUE, ORANGE, GREEN, PINK = "#7a7a7a", "#3f8fe0", "#e08214", "#2fa56a", "#d0609f"
INKED = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]
plt.rcParams.update(dict.fromkeys(INKED, INK))
plt.rcParams.update({"figure.facecolor": "none", "axes.facecolor": "none", "figure.dpi": 110})
plt.rcParams.update({"legend.framealpha": 0.0, "axes.titlesize": "medium"})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})


def unit(x):
    return x / np.linalg.norm(x)


def write(S, k, v, g=0.0, beta=1.0):
    decayed = np.exp(g) * S
    delta = beta * (v - decayed.T @ k)
    return decayed + np.outer(k, delta)


def read(S, q):
    return S.T @ q


# %% [markdown]
# ## A memory that is a matrix
#
# Into an empty memory the first write is $S = k v^{\top}$. Reading with the same key gives the
# value back, because $S^{\top} k = v\,(k^{\top}k) = v$. Reading with a key at a right angle to it
# gives nothing.

# %%
K, V = 8, 6
rng = np.random.default_rng(0)
k1, v1 = unit(rng.normal(size=K)), rng.choice([-1.0, 1.0], V)
other = rng.normal(size=K)
orthogonal = unit(other - (other @ k1) * k1)

S = write(np.zeros((K, V)), k1, v1)
print("value written       ", v1)
print("read with its key   ", read(S, k1).round(9))
print("read at right angle ", np.abs(read(S, orthogonal)).round(9))
assert np.allclose(read(S, k1), v1)
assert np.allclose(read(S, orthogonal), 0)

# %% [markdown]
# The next token, with $g = -0.5$ and $\beta = 0.8$, part by part. The whole memory fades by the
# same factor, and the write is an outer product: a matrix of rank one.

# %%
k2, v2, g, beta = unit(rng.normal(size=K)), rng.choice([-1.0, 1.0], V), -0.5, 0.8
after = write(S, k2, v2, g, beta)
change = after - np.exp(g) * S
print("rank of the write:", np.linalg.matrix_rank(change))
assert np.linalg.matrix_rank(change) == 1

panels = {
    "$S$ before": S,
    "decayed, $e^{g} S$": np.exp(g) * S,
    r"the write, $k\,\delta^{\top}$": change,
    "$S$ after": after,
}
limit = max(np.abs(panel).max() for panel in panels.values())
fig, axes = plt.subplots(1, 4, figsize=(9, 3), layout="constrained")
for ax, (title, panel) in zip(axes, panels.items(), strict=True):
    image = ax.imshow(panel, cmap="coolwarm", vmin=-limit, vmax=limit)
    ax.set(title=title, xlabel="value column", xticks=range(V), yticks=range(K))
axes[0].set_ylabel("key row")
fig.colorbar(image, ax=axes, label="entry of the matrix", shrink=0.85)
plt.show()

# %% [markdown]
# ## Two rules for writing
#
# Plain linear attention leaves the memory's own answer out of the write:
# $S \leftarrow S + k v^{\top}$. That is attention without its softmax, since the sum can be taken
# before or after the query: $S^{\top} q = \sum_s (k_s^{\top} q)\, v_s$.
#
# The delta rule writes only what is missing. It is one step of gradient descent, of length $\beta$,
# on the error that the memory makes for this key:
# $S \leftarrow S - \beta\,\nabla_S\, \tfrac12 \lVert S^{\top} k - v \rVert^2$.


# %%
def add(S, k, v):
    return S + np.outer(k, v)


keys = np.stack([unit(x) for x in rng.normal(size=(5, K))])
values, q = rng.normal(size=(5, V)), rng.normal(size=K)
S_sum = np.zeros((K, V))
for k, v in zip(keys, values, strict=True):
    S_sum = add(S_sum, k, v)
attention = (keys @ q) @ values
print("linear attention, memory against sum:", f"{np.abs(read(S_sum, q) - attention).max():.0e}")
assert np.allclose(read(S_sum, q), attention)

gradient = jax.grad(lambda S: 0.5 * jnp.sum((S.T @ k2 - v2) ** 2))(jnp.asarray(S))
step_error = distance(S - beta * np.asarray(gradient), write(S, k2, v2, beta=beta)).max_rel
print("delta rule, write against gradient step:", f"{step_error:.0e} (the gradient is float32)")
assert step_error < 1e-5

# %% [markdown]
# ## What a key reads back
#
# Write two pairs, then ask for both. Let $c = k_1^{\top} k_2$. At a right angle, $c = 0$, the pairs
# do not touch and both rules recall both values. With $c > 0$ they share the memory. The sum spoils
# both values alike. The delta rule keeps the **latest** pair exact, and the older one pays a little
# more.

# %%
cosines = np.linspace(0, 1, 21)
v_old, v_new = np.eye(V)[:2]
errors = {}
for c in cosines:
    k_old, k_new = np.eye(K)[0], c * np.eye(K)[0] + np.sqrt(1 - c**2) * np.eye(K)[1]
    for rule, put in (("delta rule", write), ("sum", add)):
        S_two = put(put(np.zeros((K, V)), k_old, v_old), k_new, v_new)
        for which, k, v in (("older", k_old, v_old), ("latest", k_new, v_new)):
            miss = np.linalg.norm(read(S_two, k) - v)
            errors.setdefault((rule, which), []).append(miss)

assert max(errors["delta rule", "latest"]) < 1e-12
assert np.allclose(errors["delta rule", "older"], cosines * np.sqrt(1 + cosines**2))
assert np.allclose(errors["sum", "older"], cosines)
assert np.allclose(errors["sum", "latest"], cosines)

fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.plot(cosines, errors["delta rule", "older"], "--o", ms=4, color=BLUE, label="delta rule, older")
ax.plot(cosines, errors["delta rule", "latest"], "-o", ms=4, color=BLUE, label="delta rule, latest")
ax.plot(cosines, errors["sum", "older"], "-", color=ORANGE, lw=2, label="sum, either pair")
ax.set(xlabel="cosine between the two keys, $c$", ylabel="error of the recalled value")
ax.set_title("Two pairs of length 1: orthogonal keys to equal keys")
ax.legend()
plt.show()

# %% [markdown]
# ## Overwriting a key
#
# Now one key throughout: four times the value $v_a$, then four times $v_b$, at a right angle to it.
# The plot shows how much of each the key reads back. With $\beta = 1$ one write replaces what was
# there. With $\beta = 0.5$ each write goes half of the way. The sum never lets go of $v_a$, and
# repeating a fact makes it louder.

# %%
k, (v_a, v_b) = unit(rng.normal(size=K)), np.eye(V)[:2]
rules = {
    "delta rule, β = 1": lambda S, v: write(S, k, v),
    "delta rule, β = 0.5": lambda S, v: write(S, k, v, beta=0.5),
    "sum (linear attention)": lambda S, v: add(S, k, v),
}
recalled = {}
for rule, put in rules.items():
    S_one, amounts = np.zeros((K, V)), [(0.0, 0.0)]
    for v in [v_a] * 4 + [v_b] * 4:
        S_one = put(S_one, v)
        amounts.append((read(S_one, k) @ v_a, read(S_one, k) @ v_b))
    recalled[rule] = np.array(amounts)
    print(f"{rule:23s} end: {amounts[-1][0]:.4f} of v_a, {amounts[-1][1]:.4f} of v_b")

one, half, total = recalled.values()
assert np.allclose(one[1:, 0], [1] * 4 + [0] * 4)
assert np.allclose(one[-1], [0, 1])
assert np.allclose(half[-1], [(1 - 0.5**4) * 0.5**4, 1 - 0.5**4])
assert np.allclose(total[-1], [4, 4])

fig, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained", sharey=True)
for ax, (rule, amounts) in zip(axes, recalled.items(), strict=True):
    ax.plot(amounts[:, 0], "-o", ms=4, color=BLUE, label="$v_a$")
    ax.plot(amounts[:, 1], "--s", ms=4, color=ORANGE, label="$v_b$")
    ax.axvline(4, color=INK, lw=0.8, ls=":")
    ax.set(title=rule, xlabel="writes with the same key", xticks=range(9))
axes[0].set_ylabel("amount read back")
axes[0].legend(loc="upper left")
plt.show()

# %% [markdown]
# ## Forgetting
#
# With $\beta = 0$ nothing is written and only the decay acts: after $t$ tokens the fraction
# $e^{g t}$ is left. It halves every $\ln 2 / (-g)$ tokens, so a head with $g = -1$ keeps about a
# word and a head with $g = -0.001$ about a page.

# %%
logs, tokens = [-1.0, -0.1, -0.01, -0.001], 1000
fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
for g, color, style in zip(logs, (PINK, ORANGE, GREEN, BLUE), ("-", "--", "-.", ":"), strict=True):
    S_fading, left = write(np.zeros((K, V)), k, v_a), [1.0]
    for _ in range(tokens):
        S_fading = write(S_fading, k, v_b, g=g, beta=0.0)
        left.append(read(S_fading, k) @ v_a)
    assert np.allclose(left, np.exp(g * np.arange(tokens + 1)))
    half_life = np.log(2) / -g
    label = f"g = {g:g}, half-life {half_life:.3g}"
    ax.semilogx(range(1, tokens + 1), left[1:], style, color=color, lw=2, label=label)
ax.axhline(0.5, color=INK, lw=0.8, ls=":")
ax.set(xlabel="tokens since the write", ylabel="fraction left", title="What decay leaves")
fig.legend(loc="outside right center")
plt.show()

# %% [markdown]
# ### Why $g$ stays in the log domain
#
# First, the decay of a long memory is a number just below 1. What matters is its distance to 1, and
# rounding takes that away; $g$ itself is small and keeps its digits. Second, the decay between two
# tokens is a difference of sums of $g$; as a quotient of products it is soon 0/0. Third, $g \le 0$
# is all it takes for $e^{g} \le 1$: decay never enlarges the memory.

# %%
g, tokens = -1e-3, 1000
print(f"left after {tokens} tokens of g = {g}; exact: {np.exp(tokens * g):.4f}")
left = {}
for dtype in (jnp.float32, jnp.bfloat16):
    decay, log_decay = (float(jnp.asarray(x, dtype)) for x in (np.exp(g), g))
    left[dtype] = decay**tokens, np.exp(tokens * log_decay)
    name = jnp.dtype(dtype).name
    print(f"  {name:8s} decay stored: {left[dtype][0]:.4f}   g stored: {left[dtype][1]:.4f}")
assert left[jnp.bfloat16][0] == 1.0
assert abs(left[jnp.bfloat16][1] - np.exp(-1)) < 1e-3

g = np.full(64, -30.0, np.float32)
sums, products = np.cumsum(g), np.cumprod(np.exp(g))
with np.errstate(invalid="ignore"):
    quotient = products[-1] / products[-2]
difference = np.exp(sums[-1] - sums[-2])
print(f"decay from token 63 to 64 at g = -30: quotient {quotient}, difference {difference:.3e}")
assert np.isnan(quotient)
assert difference == np.exp(g[0])

# %% [markdown]
# ## The layer
#
# A layer is many such heads, with everything they need computed from the token $x$:
#
# 1. projections of $x$: one vector for $q, k, v$ together, a gate $z$, and per head $b$ and $a$;
#    $\beta = \mathrm{sigmoid}(b)$ and
#    $g = -e^{A_{\log}}\,\mathrm{softplus}(a + \text{dt\_bias})$, never positive;
# 2. a short causal convolution over the last $W$ tokens, then SiLU;
# 3. the split into heads: $HK$ for $q$ and $k$, $HV$ for $v$;
# 4. $q$ and $k$ to unit length, and $q$ scaled by $K^{-1/2}$;
# 5. the delta rule of above, one $S$ per value head; value head $h$ uses key head
#    $\lfloor h\,HK / HV \rfloor$;
# 6. a norm of each head's output, gated by $\mathrm{SiLU}(z)$;
# 7. the output projection.
#
# The state that goes from token to token is $S$ and the last $W - 1$ inputs of the convolution.
# `trace_step` is one token with the result of every operator.

# %%
cfg = gdn.PRESETS["tiny"]
print(cfg)
params = gdn.init_params(jax.random.key(0), cfg)
start = gdn.init_state(cfg, batch=1)
print(f"state: S {start.S.shape}, conv_hist {start.conv_hist.shape}, {start.nbytes} bytes")

T = 48
xs = jax.random.normal(jax.random.key(1), (1, T, cfg.d_model))
trace_step = jax.jit(gdn.trace_step, static_argnames="cfg")
state, steps = start, []
for t in range(T):
    _, state, token = trace_step(params, state, xs[:, t], cfg)
    steps.append(token)
trace = {name: np.stack([np.asarray(token[name])[0] for token in steps]) for name in steps[0]}

meaning = {
    "XC": "q, k, v projected together",
    "Z": "gate of the output norm",
    "B": "raw b",
    "A": "raw a",
    "BETA": "writing strength",
    "G": "log decay",
    "XCV": "after convolution and SiLU",
    "Q": "queries",
    "K": "keys",
    "ON": "output of the delta rule",
    "ONN": "after the gated norm",
    "OUT": "output of the layer",
    "S": "new memory",
    "HIST": "new convolution history",
}
print(f"\n{'entry':6s}{'one token':16s}{'elements':>8s}  what it is")
for name, values in trace.items():
    shape = str(list(values.shape[1:]))
    print(f"{name:6s}{shape:16s}{steps[0].nelems(name):8d}  {meaning[name]}")

# %% [markdown]
# Decay and $\beta$ change with every token. $A_{\log}$ and the bias belong to the head (learnt,
# here drawn at random in the ranges of trained layers) and set its habit: some heads hold on, some
# let go. The size of $S$ follows: the head that forgets least carries the largest memory.

# %%
decays, norms = np.exp(trace["G"]), np.linalg.norm(trace["S"], axis=(-2, -1))
heads = range(cfg.num_v_heads)
for h in heads:
    decay, norm = np.median(decays[:, h]), norms[:, h].mean()
    print(f"head {h}: median decay {decay:.3f}, mean norm of S {norm:.2f}")
assert (trace["G"] <= 0).all()
assert np.median(decays, axis=0).argmax() == norms.mean(axis=0).argmax()

fig, axes = plt.subplots(3, 1, figsize=(8, 5), layout="constrained", sharex=True)
extent = (0.5, T + 0.5, cfg.num_v_heads - 0.5, -0.5)
for ax, name, values in ((axes[0], "decay $e^{g}$", decays), (axes[1], r"$\beta$", trace["BETA"])):
    image = ax.imshow(values.T, vmin=0, vmax=1, aspect="auto", extent=extent)
    ax.set(ylabel="head", yticks=heads)
    fig.colorbar(image, ax=ax, label=name)
for h, color, style in zip(heads, (BLUE, ORANGE, GREEN, PINK), ("-", "--", "-.", ":"), strict=True):
    axes[2].plot(range(1, T + 1), norms[:, h], style, color=color, label=f"head {h}")
axes[2].set(xlabel="token", ylabel=r"$\|S\|_F$", ylim=(0, None))
fig.legend(loc="outside lower center", ncols=cfg.num_v_heads)
plt.show()

# %% [markdown]
# Is this the recurrence from the top of the page? Take what the layer fed to its delta rule, run
# `write` and `read` on it head by head, and compare with the layer's own `ON` and `S`.

# %%
v = trace["XCV"][:, 2 * cfg.key_dim :].reshape(T, cfg.num_v_heads, cfg.head_v_dim)
ON = np.empty_like(trace["ON"])
for h in heads:
    key_head = h // cfg.heads_per_key
    S = np.zeros((cfg.head_k_dim, cfg.head_v_dim))
    for t in range(T):
        k, q = trace["K"][t, key_head], trace["Q"][t, key_head]
        S = write(S, k, v[t, h], trace["G"][t, h], trace["BETA"][t, h])
        ON[t, h] = read(S, q)
    print(f"head {h}: S after {T} tokens, max_rel {distance(S, trace['S'][-1, h]).max_rel:.1e}")
    assert distance(S, trace["S"][-1, h]).max_rel < 1e-5
_, worst = worst_head(ON, trace["ON"])
print(f"output of the delta rule, worst token: max_rel {worst:.1e}")
assert worst < 1e-5

# %% [markdown]
# ## One device run
#
# `decode` takes all tokens in one `lax.scan`, with the state on the device throughout. Under `jit`
# it gives the same bits as a call of `decode_step` per token, and so does `trace_step`: looking at
# the operators changes nothing.

# %%
decode = jax.jit(gdn.decode, static_argnames="cfg")
decode_step = jax.jit(gdn.decode_step, static_argnames="cfg")
ys, end = decode(params, start, xs, cfg)

state, by_step = start, []
for t in range(T):
    y, state = decode_step(params, state, xs[:, t], cfg)
    by_step.append(y)

pairs = {
    "ys, step by step": (jnp.stack(by_step, axis=1), ys),
    "ys, traced": (trace["OUT"][None], ys),
    "S": (state.S, end.S),
    "conv_hist": (state.conv_hist, end.conv_hist),
}
for name, (ours, theirs) in pairs.items():
    count = unequal(np.asarray(ours), np.asarray(theirs))
    print(f"{name:17s}{count} of {theirs.size} elements unequal")
    assert count == 0

# %% [markdown]
# ## Who is right?
#
# The oracle computes the same seven steps in float64 with NumPy, token by token. The distance of
# one token's result is
#
# $$\text{max\_rel} = \max|\text{out} - \text{ref}| \,/\, \max|\text{ref}|$$
#
# and the table shows the worst token of each entry. One rounding in float32 costs up to
# $6 \cdot 10^{-8}$, and roundings add up along the seven steps.

# %%
weights = {name: np.asarray(value) for name, value in vars(params).items()}
reference = oracle.layer_trace(weights, cfg, np.asarray(xs[0]))
print("entry  worst token  max_rel to float64")
for name, values in trace.items():
    t, max_rel = worst_head(values, reference[name])
    print(f"{name:6s}{t + 1:12d}  {max_rel:.1e}")
    assert max_rel < 1e-5
