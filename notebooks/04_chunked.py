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
# # A prompt in chunks: the recurrence as matrix products
#
# Decoding takes tokens one at a time, because it does not know the next one. A prompt is known in
# full, and a loop over 32 000 tokens is slow for a plain reason: every token reads and writes the
# whole state for a few products of a matrix and a vector. The **chunked form** takes 64 tokens at
# once, with products of two matrices and one triangular system, and touches the state once. It is
# the same function, not an approximation. But there are ways to write it down that are equal on
# paper and fail in floating point. This page derives it, then shows two such ways.
#
# One head, in float64. The loop over tokens is what everything is compared with:
#
# $$
# \delta_t = \beta_t\,(v_t - e^{g_t} S_{t-1}^{\top} k_t), \qquad
# S_t = e^{g_t} S_{t-1} + k_t\,\delta_t^{\top}, \qquad
# o_t = S_t^{\top} q_t
# $$

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import gdn_jax as gdn
from gdn_jax.report.metrics import distance

INK, BLUE, ORANGE, GREEN, PINK = "#7a7a7a", "#3f8fe0", "#e08214", "#2fa56a", "#d0609f"
INKED = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]
plt.rcParams.update(dict.fromkeys(INKED, INK))
plt.rcParams.update({"figure.facecolor": "none", "axes.facecolor": "none", "figure.dpi": 110})
plt.rcParams.update({"legend.framealpha": 0.0, "axes.titlesize": "medium"})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})


def token_loop(q, k, v, g, beta, S):
    o, deltas = np.empty_like(v), np.empty_like(v)
    for t in range(len(v)):
        S = np.exp(g[t]) * S
        deltas[t] = beta[t] * (v[t] - S.T @ k[t])
        S = S + np.outer(k[t], deltas[t])
        o[t] = S.T @ q[t]
    return o, S, deltas


def same(a, b):
    assert distance(a, b).max_rel < 1e-13
    return f"equal to {distance(a, b).max_rel:.0e}"


T, K, V = 192, 16, 8
rng = np.random.default_rng(0)
q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.normal(size=(2, T, K)))
v, S0 = rng.normal(size=(T, V)), rng.normal(size=(K, V))
g, beta = -rng.uniform(0, 0.2, T), rng.uniform(0, 1, T)
loop_o, S_end, loop_delta = token_loop(q, k, v, g, beta, S0)

# %% [markdown]
# ## Two tokens
#
# Put $S_1 = e^{g_1} S_0 + k_1 \delta_1^{\top}$ into what token 2 does, and $S_1$ is gone:
#
# $$
# \begin{aligned}
# \delta_2 &= \beta_2\,\bigl(v_2 - e^{g_1+g_2} S_0^{\top} k_2
#             - e^{g_2} (k_2^{\top} k_1)\,\delta_1\bigr) \\
# S_2 &= e^{g_1+g_2} S_0 + e^{g_2} k_1 \delta_1^{\top} + k_2 \delta_2^{\top}
# \end{aligned}
# $$
#
# Token 2 needs three things: the state before both, what token 1 wrote, and one number that says
# how much of that it sees, the product of their keys times the decay between them.

# %%
delta1 = beta[0] * (v[0] - np.exp(g[0]) * S0.T @ k[0])
seen = np.exp(g[1]) * (k[1] @ k[0])
delta2 = beta[1] * (v[1] - np.exp(g[0] + g[1]) * S0.T @ k[1] - seen * delta1)
S2 = np.exp(g[0] + g[1]) * S0 + np.exp(g[1]) * np.outer(k[0], delta1) + np.outer(k[1], delta2)
print("delta 2 against the loop:", same(delta2, loop_delta[1]))
loop_state = token_loop(*(x[:2] for x in (q, k, v, g, beta)), S0)[1]
print("S 2 against the loop:    ", same(S2, loop_state))

# %% [markdown]
# ## Four tokens: a triangular system
#
# The same for every token. Write $M_{ij} = e^{g_{j+1} + \dots + g_i}$ for the decay from token $j$
# to token $i \ge j$ (1 for $i = j$, 0 for $i < j$) and $c_i = e^{g_1 + \dots + g_i}$ for the one
# from the state before the chunk. Then
#
# $$
# \delta_i + \sum_{j<i} A_{ij}\,\delta_j = \beta_i\,(v_i - c_i\,S_0^{\top} k_i), \qquad
# A_{ij} = \beta_i\,M_{ij}\,(k_i^{\top} k_j) \quad (j < i)
# $$
#
# or $(I + A)\,\Delta = R$ with a row per token. $A$ is zero on and above the diagonal, so row $i$
# needs only the rows before it: forward substitution.


# %%
def between(g):
    """Entry i, j: the sum of the gates behind token j up to token i."""
    behind = np.tril(np.ones((len(g), len(g)), bool), -1)
    return np.cumsum(np.where(behind, g[:, None], 0), axis=0)


def decays(g):
    return np.tril(np.exp(between(g)))


def substitute(A, right):
    x = right.copy()
    for i in range(1, len(A)):
        x[i] -= A[i, :i] @ x[:i]
    return x


n = 4
M, c = decays(g[:n]), np.exp(np.cumsum(g[:n]))[:, None]
A = np.tril(beta[:n, None] * M * (k[:n] @ k[:n].T), -1)
R = beta[:n, None] * (v[:n] - c * (k[:n] @ S0))
print("M\n", M.round(3), "\nA\n", A.round(3))
assert np.isclose(M[3, 0], np.exp(g[1] + g[2] + g[3]))
assert np.isclose(A[1, 0], beta[1] * seen)
print("all four deltas against the loop:", same(substitute(A, R), loop_delta[:n]))

# %% [markdown]
# ## The WY form
#
# One thing stands in the way of speed: $R$ holds $S_0$, so a chunk could not begin before the one
# before it is done. But $S_0$ enters linearly. Solve once for both parts of the right side,
#
# $$
# (I + A)\,[\,U,\ X\,] = \beta\,[\,v,\ c\,k\,], \qquad \Delta = U - X S_0
# $$
#
# and the system, the only part with a loop over rows, is solved for **all chunks at the same
# time**. What goes from chunk to chunk is three products:
#
# $$
# \begin{aligned}
# \Delta &= U - X S_0 \\
# O &= c\,(Q S_0) + \bigl(M \circ Q K^{\top}\bigr)\,\Delta \\
# S &= c_n S_0 + \bigl(M_{n,:}\, K\bigr)^{\top} \Delta
# \end{aligned}
# $$


# %%
def chunk(q, k, v, g, beta, S, M=None):
    M, c, beta = decays(g) if M is None else M, np.exp(np.cumsum(g))[:, None], beta[:, None]
    A = np.tril(beta * M * (k @ k.T), -1)
    U, X = np.split(substitute(A, beta * np.hstack([v, c * k])), [v.shape[1]], axis=1)
    delta = U - X @ S
    o = c * (q @ S) + (M * (q @ k.T)) @ delta
    return o, c[-1] * S + (M[-1][:, None] * k).T @ delta, delta


for C in (1, 2, 16, 64, 192):
    S, parts = S0, []
    for at in range(0, T, C):
        tokens = slice(at, at + C)
        o, S, delta = chunk(*(x[tokens] for x in (q, k, v, g, beta)), S)
        parts.append((o, delta))
    o, delta = (np.concatenate(x) for x in zip(*parts, strict=True))
    checks = {"deltas": (delta, loop_delta), "outputs": (o, loop_o), "state": (S, S_end)}
    print(f"chunks of {C:3d}:", ", ".join(f"{n} {same(*pair)}" for n, pair in checks.items()))

# %% [markdown]
# Whatever the chunk, the result is that of the loop. In pictures, for the first 24 tokens:

# %%
n = 24
M = decays(g[:n])
A = np.tril(beta[:n, None] * M * (k[:n] @ k[:n].T), -1)
panels = {
    "decay, $M$": M,
    r"keys, $k_i^{\top} k_j$": k[:n] @ k[:n].T,
    "system, $A$": A,
    "$(I + A)^{-1}$": substitute(A, np.eye(n)),
}
fig, axes = plt.subplots(1, 4, figsize=(9, 2.6), layout="constrained")
for ax, (title, panel) in zip(axes, panels.items(), strict=True):
    image = ax.imshow(panel, cmap="coolwarm", vmin=-0.5, vmax=0.5)
    ax.set(title=title, xlabel="token $j$", xticks=[], yticks=[])
axes[0].set_ylabel("token $i$")
fig.colorbar(image, ax=axes, label="entry of the matrix", shrink=0.85, extend="both")
plt.show()

# %% [markdown]
# ## Exponents: sums of gates between two tokens, nothing else
#
# On paper, with $s_i = g_1 + \dots + g_i$, there are three ways to the decay between two tokens:
#
# $$
# M_{ij} = e^{s_i} \cdot e^{-s_j} = e^{s_i - s_j} = e^{g_{j+1} + \dots + g_i}
# $$
#
# The first makes $M$ a product of two vectors, which could be multiplied into $q$ and $k$ once and
# for all. The second needs one running sum. The third costs $C^2$ additions a chunk. Three kinds of
# gates, in float32:

# %%
C = 64
kinds = {
    "mild, 0 to -0.2": g[:C],
    "decay 1e-12 a token": np.full(C, np.log(1e-12)),
    "-5000 once, then -2e-4": np.where(np.arange(C) == 0, -5000, -2e-4),
}


def ways(g):
    s = np.cumsum(g)
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.tril(np.exp(s)[:, None] * np.exp(-s)[None])
        return product, np.tril(np.exp(s[:, None] - s[None])), decays(g)


heads = ("exp(s_i)·exp(-s_j)", "exp(s_i - s_j)", "sum of gates between")
print("max_rel of the outputs to the float64 loop\n" + " " * 24, *(f"{x:20s}" for x in heads))
errors = {}
with np.errstate(invalid="ignore"):
    for name, gates in kinds.items():
        drawn = [np.asarray(x, np.float32) for x in (q[:C], k[:C], v[:C], gates, beta[:C], S0)]
        exact = token_loop(*(x.astype(np.float64) for x in drawn))[0]
        errors[name] = [distance(chunk(*drawn, M=M)[0], exact).max_rel for M in ways(drawn[3])]
        print(f"{name:24s}", *(f"{x:<20.0e}" for x in errors[name]))
mild, strong, once = errors.values()
assert max(mild) < 1e-5
assert strong[0] == np.inf
assert once[1] > 1e-3
assert max(strong[2], once[2]) < 1e-5

# %% [markdown]
# `inf` means that something was not finite. Where it comes from: a decay of $10^{-12}$ is
# $g = -27.6$, and $e^{-s_j}$ leaves float32 (largest number 3e38) at the fourth token, float64 at
# the 26th. The other factor has become 0 by then, and $0 \cdot \infty$ is not a number, for a decay
# that is simply 1 when $i = j$.

# %%
for dtype in (np.float32, np.float64):
    s = np.cumsum(np.full(C, np.log(1e-12), dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        grown, shrunk = np.exp(-s), np.exp(s)
        first = int(np.argmax(np.isinf(grown)))
        last = shrunk[-1] * grown[-1]
    print(f"{dtype.__name__}: exp(-s) is {grown[0]:.0e}, {grown[1]:.0e}, ..,", end=" ")
    print(f"infinite from token {first + 1}; last diagonal entry {last}")
    assert first + 1 == {np.float32: 4, np.float64: 26}[dtype]

# %% [markdown]
# The difference $s_i - s_j$ cannot overflow below the diagonal, but it forgets. After one gate of
# $-5000$ every running sum lies near $-5000$, where neighbouring float32 numbers are 0.00049 apart.
# Smaller gates are rounded to a multiple of that, which may be zero, and subtracting the large part
# afterwards does not bring them back. A sum that begins behind token $j$ never held the $-5000$.

# %%
print("distance of float32 numbers near -5000:", np.spacing(np.float32(5000)))
fig, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
for ax, small in zip(axes, (-2e-4, -3e-4, -1e-3), strict=True):
    gates = np.where(np.arange(C) == 0, -5000, small).astype(np.float32)
    s, tokens = np.cumsum(gates), np.arange(1, C + 1)
    exact = np.cumsum(np.where(np.arange(C) == 0, 0, gates.astype(np.float64)))
    difference, summed = s - s[0], between(gates)[:, 0]
    assert distance(summed, exact).max_rel < 1e-6
    found = f"sum between {summed[-1]:.5f}, difference of sums {difference[-1]:.5f}"
    print(f"g = {small}: after {C - 1} tokens exact {exact[-1]:.5f}, {found}")
    ax.plot(tokens, exact, color=INK, lw=5, alpha=0.4, label="exact")
    ax.plot(tokens, summed, color=BLUE, label="sum of gates between")
    ax.plot(tokens, difference, "--", color=ORANGE, label="difference of sums")
    ax.set(title=f"$g = {small}$", xlabel="token $i$")
axes[0].set_ylabel("exponent from token 1 to $i$")
axes[0].legend(loc="lower left", fontsize="small")
plt.show()

# %% [markdown]
# A last trap. **Above** the diagonal a difference of sums is positive, and its exponential may be
# infinite. Masking the result hides that, but not from the gradient, which is $0 \cdot \infty$. So
# the mask comes before the exponential.


# %%
def after(x):
    return jnp.where(x <= 0, jnp.exp(x), 0.0)


def before(x):
    return jnp.exp(jnp.where(x <= 0, x, -jnp.inf))


for mask in (after, before):
    value, gradient = jax.value_and_grad(mask)(100.0)
    print(f"mask {mask.__name__:6s} the exponential: value {value}, gradient {gradient}")
assert np.isnan(jax.grad(after)(100.0))
assert jax.grad(before)(100.0) == 0

# %% [markdown]
# ## Inverses: where they explode
#
# Forward substitution goes row by row. Hardware likes products of matrices better, and since $A$ is
# strictly triangular, $A^C = 0$ and the inverse is a finite sum, which **doubling** gets in
# $\log_2 C$ steps:
#
# $$
# (I + A)^{-1} = I - A + A^2 - A^3 + \dots = (I - A)(I + A^2)(I + A^4)(I + A^8) \cdots
# $$
#
# Four ways to the inverse, in bfloat16 (factors and results rounded, sums inside a product in
# float32, as tensor cores do it), float32 and float64. On random keys, and on one key repeated with
# $g = -10^{-3}$ and $\beta = 0.835$: a prompt that says the same thing again and again. There the
# inverse is known: its entries below the diagonal are $-\beta\,(1-\beta)^{i-j-1} e^{g(i-j)}$, none
# larger than 1.


# %%
def product(a, b):
    wide = np.promote_types(a.dtype, np.float32)
    return (a.astype(wide) @ b.astype(wide)).astype(a.dtype)


def series(A):
    inverse = term = np.eye(len(A), dtype=A.dtype)
    for _ in range(len(A) - 1):
        term = product(-A, term)
        inverse = inverse + term
    return inverse


def doubling(A):
    power = product(A, A)
    inverse = np.eye(len(A), dtype=A.dtype) - A
    for _ in range(int(np.log2(len(A))) - 1):
        inverse = inverse + product(inverse, power)
        power = product(power, power)
    return inverse


def substitution(A):
    inverse = np.eye(len(A), dtype=A.dtype)
    for i in range(1, len(A)):
        inverse[i, :i] = -product(A[i : i + 1, :i], inverse[:i, :i])[0]
    return inverse


def blocks(A):
    """Invert both halves of the diagonal, then the block below them, which needs only those."""
    if len(A) == 1:
        return np.eye(1, dtype=A.dtype)
    h = len(A) // 2
    top, bottom = blocks(A[:h, :h]), blocks(A[h:, h:])
    corner = -product(bottom, product(A[h:, :h], top))
    return np.block([[top, np.zeros_like(corner.T)], [corner, bottom]])


def system(keys):
    gates = np.full(len(keys), -1e-3)
    return np.tril(0.835 * decays(gates) * (keys @ keys.T), -1)


def exact_inverse(A):
    return substitution(A.astype(np.float64))


repeated = np.tile(np.eye(128)[0], (64, 1))
scattered = rng.normal(size=(64, 128))
scattered /= np.linalg.norm(scattered, axis=1, keepdims=True)

A = system(repeated)
apart = np.subtract.outer(np.arange(64), np.arange(64)).clip(1)
known = np.tril(-0.835 * (1 - 0.835) ** (apart - 1) * np.exp(-1e-3 * apart), -1) + np.eye(64)
print("repeated key, substitution in float64 against the formula:", same(exact_inverse(A), known))

dtypes = {"bfloat16": jnp.bfloat16, "float32": np.float32, "float64": np.float64}
methods = (series, doubling, substitution, blocks)
error = {}
print("\nlargest error of an entry, one chunk of 64" + " " * 4, *(f"{n:10s}" for n in dtypes))
for keys, which in ((scattered, "random keys"), (repeated, "repeated key")):
    A = system(keys)
    for method in methods:
        for name, dtype in dtypes.items():
            found = method(A.astype(dtype)).astype(np.float64)
            error[which, method.__name__, name] = np.abs(found - exact_inverse(A)).max()
        row = (error[which, method.__name__, name] for name in dtypes)
        print(f"  {which:14s}{method.__name__:31s}", *(f"{x:<10.0e}" for x in row))

for method in methods:
    assert error["random keys", method.__name__, "bfloat16"] < 1e-2
assert error["repeated key", "doubling", "bfloat16"] > 1e10
assert error["repeated key", "doubling", "float32"] > 1e6
assert error["repeated key", "substitution", "float32"] < 1e-6
assert error["repeated key", "blocks", "float32"] < 1e-6

# %% [markdown]
# With random keys every method is as good as its number format, so a test on random keys finds
# nothing. With the repeated key doubling in bfloat16 is off by
# $10^{12}$ where no entry exceeds 1; float32 does not save it, and float64 keeps no digit.
# Substitution and blocks do not notice.
#
# The reason is in the terms of the sum. The powers of $A$ count the paths from token to token, grow
# with binomial coefficients, and cancel to something small. Rounding is relative to the terms, not
# to what remains of them.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
sizes = (4, 8, 16, 32, 64)
looks = (("bfloat16", PINK), ("float32", ORANGE), ("float64", GREEN))
for method, style in ((doubling, "-o"), (substitution, "--s")):
    for name, color in looks:
        if (method, name) == (substitution, "float64"):
            continue
        misses = []
        for size in sizes:
            A = system(repeated[:size])
            found = method(A.astype(dtypes[name])).astype(np.float64)
            misses.append(np.abs(found - exact_inverse(A)).max())
        label = f"{method.__name__}, {name}"
        axes[0].loglog(sizes, misses, style, ms=4, color=color, label=label)
axes[0].axhline(1, color=INK, lw=0.8, ls=":")
axes[0].set(xlabel="tokens of the chunk", ylabel="largest error", title="Inverse, repeated key")
axes[0].set_xticks(sizes, sizes, minor=False)
axes[0].minorticks_off()

for keys, label, color in ((repeated, "repeated key", BLUE), (scattered, "random keys", INK)):
    A, term, largest = system(keys), np.eye(64), []
    for _ in range(63):
        term = A @ term
        largest.append(np.abs(term).max())
    axes[1].semilogy(range(1, 64), largest, color=color, lw=2, label=label)
    print(f"{label}: largest entry of any power of A {max(largest):.0e}")
axes[1].axhline(1, color=INK, lw=0.8, ls=":")
axes[1].set(xlabel="$m$", title="Largest entry of $A^m$, chunk of 64", ylim=(1e-30, 1e20))
axes[1].legend(fontsize="small")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# This package solves the system by forward substitution in float32. What the output of a chunk
# makes of it, with the inverse taken one way and the other:

# %%
values, gates, strength = rng.normal(size=(64, V)), np.full(64, -1e-3), np.full(64, 0.835)
loop = token_loop(scattered, repeated, values, gates, strength, np.zeros((128, V)))[0]
scores = decays(gates) * (scattered @ repeated.T)
for method, name in ((substitution, "float32"), (doubling, "float32"), (doubling, "bfloat16")):
    inverse = method(system(repeated).astype(dtypes[name])).astype(np.float64)
    o = scores @ (inverse @ (strength[:, None] * values))
    print(f"{method.__name__:13s} in {name:9s} outputs off by {distance(o, loop).max_rel:.0e}")

# %% [markdown]
# ## What a chunk costs
#
# Per token and value head, with $G = HV / HK$ value heads to a key head, in float32. The flops of
# the products (a multiplication and an addition are two):
#
# | part | flops |
# | --- | --- |
# | $K K^{\top}$ and $Q K^{\top}$, once per key head | $4\,C K / G$ |
# | the triangular system | $C\,(K + V)$ |
# | $(M \circ Q K^{\top})\,\Delta$ | $2\,C V$ |
# | $X S$, $Q S$, $K^{\top} \Delta$ | $6\,K V$ |
#
# And the bytes, when what the chunks give without the state ($U$, $X$, the scores, decayed $q$ and
# $k$) is written by one pass and read by the next:
#
# | part | bytes |
# | --- | --- |
# | $q, k, v, g, \beta$ read, $o$ written | $4\,(2K / G + 2V + 2)$ |
# | between the passes, written and read | $8\,(V + 3K + C + 1/C)$ |
# | the state, read and written once a chunk | $8\,K V / C$ |
#
# The loop over tokens does $7\,K V$ flops and, with the state in memory, moves $8\,K V$ bytes for
# it. So the chunked form does about as much arithmetic, with large chunks more. It saves traffic,
# turns the arithmetic into products that tensor cores can take, and leaves $T / C$ steps one after
# another instead of $T$.


# %%
def flops(cfg, C):
    K, V, G = cfg.head_k_dim, cfg.head_v_dim, cfg.heads_per_key
    inside = 4 * C * K / G + C * (K + V) + 2 * C * V
    return {"with the state": 6 * K * V, "inside the chunk": inside}


def traffic(cfg, C):
    K, V, G = cfg.head_k_dim, cfg.head_v_dim, cfg.heads_per_key
    return {
        "operands": 4 * (2 * K / G + 2 * V + 2),
        "between the passes": 8 * (V + 3 * K + C + 1 / C),
        "the state": 8 * K * V / C,
    }


def equations(jaxpr, times=1):
    """Every equation of a program and how often it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        again = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for inner in eqn.params.values():
            if hasattr(inner, "eqns"):
                yield from equations(inner, again)


def counted(cfg, C, T=1024):
    """The same two from the package's own program, per token and value head."""
    shapes = {"q": (cfg.num_k_heads, cfg.head_k_dim), "v": (cfg.num_v_heads, cfg.head_v_dim)}
    shapes |= {"k": shapes["q"], "g": shapes["v"][:1], "beta": shapes["v"][:1]}
    args = {n: jax.ShapeDtypeStruct((1, T, *s), jnp.float32) for n, s in shapes.items()}
    program = jax.make_jaxpr(lambda x: gdn.chunk_gated_delta_rule(**x, chunk_size=C))(args)
    work = moved = 0
    for eqn, times in equations(program.jaxpr):
        first, out = eqn.invars[0].aval if eqn.invars else None, eqn.outvars[0].aval
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            work += times * 2 * out.size * np.prod([first.shape[axis] for axis in contracted])
        if eqn.primitive.name == "triangular_solve":
            work += times * out.size * C
        if eqn.primitive.name == "scan":
            chunks = [x.aval for x in eqn.invars if x.aval.shape[0] == T // C]
            moved += 2 * sum(x.size * x.dtype.itemsize for x in chunks)
    return work / (T * cfg.num_v_heads), moved / (T * cfg.num_v_heads)


big, sizes = gdn.PRESETS["qwen3.5-27b"], (16, 32, 64, 128)
entries = big.head_k_dim * big.head_v_dim
costs = {"loop": (7 * entries, 8 * entries + traffic(big, 1)["operands"], 32768)}
for C in sizes:
    costs[C] = sum(flops(big, C).values()), sum(traffic(big, C).values()), 32768 // C
    assert np.allclose(counted(big, C), (costs[C][0], traffic(big, C)["between the passes"]))

print("a 27B layer: 16 key heads, 48 value heads of 128; per token and value head")
print("chunk     flops     bytes   flops/byte   steps of 32768 tokens")
for C, (work, moved, steps) in costs.items():
    print(f"{C!s:>5s}{work:10.0f}{moved:10.0f}{work / moved:13.1f}{steps:24d}")

# %% [markdown]
# The assertion compares the flops, and the bytes between the passes, with what the package's own
# program contains.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
places = np.arange(len(sizes))
for ax, cost, unit in ((axes[0], flops, "kflop"), (axes[1], traffic, "kB")):
    bottom = np.zeros(len(sizes))
    table = [cost(big, C) for C in sizes]
    for part, color in zip(table[0], (BLUE, ORANGE, GREEN), strict=False):
        heights = np.array([row[part] for row in table]) / 1e3
        ax.bar(places, heights, 0.6, bottom, color=color, label=part)
        bottom += heights
    ax.set(xlabel="tokens of a chunk", ylabel=unit, xlim=(-0.5, 3.5))
    ax.set_xticks(places, sizes)
    ax.legend(loc="upper left", fontsize="small")
work, moved, _ = costs["loop"]
axes[0].axhline(work / 1e3, color=INK, lw=1, ls=":", label="loop over tokens")
axes[0].legend(loc="upper left", fontsize="small")
axes[0].set(title="Arithmetic, per token and value head", ylim=(0, 280))
axes[1].set(title=f"Memory traffic (the loop: {moved / 1e3:.0f} kB)", ylim=(0, 22))
plt.show()

# %% [markdown]
# Flops grow with the chunk, traffic of the state falls with it: bytes are least at
# $C = \sqrt{KV} = 128$, but from 64 on there is little left to win, and the arithmetic inside the
# chunk grows on. The default is 64. What is fastest on a device, only measuring says; the result is
# the same up to the order of float32 sums.
#
# ## The call
#
# All of this, for any number of tokens and heads, is `gdn.chunk_gated_delta_rule`. Here with both
# traps at once: one key throughout, and a gate of $-5000$ every 64 tokens.

# %%
keys, gates = np.tile(np.eye(K)[0], (T, 1)), np.where(np.arange(T) % 64 == 9, -5000, -2e-4)
operands = [np.asarray(x, np.float32) for x in (q, keys, v, gates, np.full(T, 0.835), S0)]
exact = token_loop(*(x.astype(np.float64) for x in operands))

*tokens, start = operands
one_head = [x[None, :, None] for x in tokens]  # [B, T, heads, ..]
rule = jax.jit(gdn.chunk_gated_delta_rule)
o, S = rule(*one_head, scale=1.0, initial_state=start[None, None])
misses = {"outputs": distance(o[0, :, 0], exact[0]), "state": distance(S[0, 0], exact[1])}
for name, miss in misses.items():
    print(f"{name:8s}off by {miss.max_rel:.0e}")
    assert miss.max_rel < 1e-5

# %% [markdown]
# For a whole layer, projections and convolution included, a user needs one call, `gdn.prefill`: the
# prompt at once, and `decode_step` goes on from the state it leaves.

# %%
cfg = gdn.PRESETS["tiny"]
params = gdn.init_params(jax.random.key(0), cfg)
xs = jax.random.normal(jax.random.key(1), (1, 100, cfg.d_model))

calls = (gdn.prefill, gdn.decode_step, gdn.decode)
prefill, decode_step, decode = (jax.jit(call, static_argnames="cfg") for call in calls)

ys, state = prefill(params, gdn.init_state(cfg, batch=1), xs[:, :99], cfg=cfg)
y, state = decode_step(params, state, xs[:, 99], cfg=cfg)

slow, slow_state = decode(params, gdn.init_state(cfg, batch=1), xs, cfg=cfg)
pairs = {"prompt": (ys, slow[:, :99]), "next": (y, slow[:, 99]), "state": (state.S, slow_state.S)}
for name, pair in pairs.items():
    print(f"{name:7s}against 100 single steps: {distance(*pair).max_rel:.0e}")
    assert distance(*pair).max_rel < 1e-5
