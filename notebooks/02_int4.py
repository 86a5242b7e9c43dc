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
# # int4 weights: what they cost, and what proves the code that uses them
#
# Two questions that are easily mixed up:
#
# 1. What does it **cost** to store a weight in four bits? Some accuracy, which no code gets back.
# 2. Is the **code** right that reads those bits and multiplies by them? It should lose nothing more
#    than float32 rounding does.
#
# A single number, the distance between an int4 layer and a float32 layer, holds both. It is nearly
# all cost, so it can hide almost any mistake in the code. The second half of this page shows how,
# and what to measure instead.

# %%
import dataclasses

import gguf
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.layer.params import LARGE
from gdn_jax.quant.q4array import unpack
from gdn_jax.quant.quantize import RULES
from gdn_jax.report.metrics import distance

INK, BLUE, ORANGE, GREEN, PINK = "#7a7a7a", "#3f8fe0", "#e08214", "#2fa56a", "#d0609f"
INKED = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]
plt.rcParams.update(dict.fromkeys(INKED, INK))
plt.rcParams.update({"figure.facecolor": "none", "axes.facecolor": "none", "figure.dpi": 110})
plt.rcParams.update({"legend.framealpha": 0.0, "axes.titlesize": "medium"})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
rng = np.random.default_rng(0)

# %% [markdown]
# ## A group of 32
#
# A row of a weight matrix is cut into groups of 32 columns. A group keeps one float16 scale $s$ and
# for each weight an integer $n$ of four bits, from $-8$ to $7$; the weight is $n \cdot s$. So a
# group can only take 16 levels, all multiples of its scale.
#
# The rule `q4_0`, which is that of GGUF files, takes the value of largest magnitude, $m$, and maps
# it to $-8$: $s = m / (-8)$. The scale has the opposite sign of $m$.

# %%
group = rng.normal(size=(1, 32)).astype(np.float32)
w = gdn.quantize_q4(group)
integers, scale = np.asarray(unpack(w)).ravel(), float(w.scales[0, 0])
values, levels = np.asarray(gdn.dequantize(w)).ravel(), np.arange(-8, 8) * scale
largest = np.abs(group[0]).argmax()
print("integers:", *integers)
print(f"largest: {group[0, largest]:.4f} in column {largest}; scale: {scale:.4f}")
assert scale == np.float16(group[0, largest] / -8)
assert integers[largest] == -8
assert np.array_equal(values, integers * np.float32(scale))
assert np.isin(values, levels.astype(np.float32)).all()

fig, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
for n, level in zip(range(-8, 8), levels, strict=True):
    ax.axhline(level, color=INK, lw=0.5, alpha=0.6)
    ax.annotate(n, (1.005, level), xycoords=("axes fraction", "data"), va="center", fontsize=7)
ax.vlines(range(32), group[0], values, color=ORANGE, lw=2)
ax.plot(group[0], "o", ms=5, color=BLUE, label="weight")
ax.plot(values, "_", ms=9, mew=2, color=ORANGE, label="stored as, and the error")
ax.set(xlabel="column of the group", ylabel="value", title="16 levels; their integers at the right")
fig.legend(loc="outside upper right", ncols=2)
plt.show()

# %% [markdown]
# There are eight levels on the side of $m$ and only seven on the other. Most values are at most
# half a step from a level. A value on the other side that is nearly as large as $m$ has no level to
# go to: it is **clipped** to $7$, and may be a whole step off.

# %%
two_sided = np.zeros((1, 32), np.float32)
two_sided[0, :2] = 1.0, -0.99
w = gdn.quantize_q4(two_sided)
off = np.abs(np.asarray(gdn.dequantize(w)) - two_sided)[0] / abs(float(w.scales[0, 0]))
print("integers of 1 and -0.99:", *np.asarray(unpack(w))[0, 0, :2])
print(f"errors in steps: {off[0]:.2f} and {off[1]:.2f}")
assert np.asarray(unpack(w))[0, 0, :2].tolist() == [-8, 7]
assert off[0] == 0
assert 0.9 < off[1] <= 1

# %% [markdown]
# ## Where the error comes from
#
# From rounding, and the step is what sets its size. Over many groups the error is spread evenly
# between $-s/2$ and $s/2$, so its root mean square is $s/\sqrt{12}$, about 0.29 of a step. (Half a
# step holds for the exact $m/8$; rounding that to float16 adds at most $8 \cdot 2^{-11}$ steps.)
# The peak at zero is the largest value of each group, one weight in 32, which has nearly no error.
#
# The step is an eighth of the **largest** value. One outlier makes it coarse for the 31 others. The
# right plot puts an outlier into groups of normal values: the error of the others grows with the
# outlier's size, until the step is so wide that all of them become zero and the error is 1.

# %%
weights = rng.normal(size=(512, 1024)).astype(np.float32)
w = gdn.quantize_q4(weights)
steps = np.abs(np.asarray(w.scales, np.float32))[..., None]
errors = (np.asarray(gdn.dequantize(w)) - weights).reshape(512, -1, 32) / steps
clipped = (np.asarray(unpack(w)) == 7) & (np.abs(errors) > 0.5)
rms = np.sqrt(np.mean(errors**2))
print(f"error in steps: rms {rms:.3f}, largest unclipped {np.abs(errors[~clipped]).max():.4f}")
print(f"clipped: {clipped.mean():.2%} of the weights, largest {np.abs(errors[clipped]).max():.3f}")
assert np.abs(errors[~clipped]).max() <= 0.5 + 8 * 2**-11
assert np.abs(errors[clipped]).max() <= 1 + 8 * 2**-11
assert abs(rms * np.sqrt(12) - 1) < 0.05
m = np.abs(weights.reshape(errors.shape)).argmax(axis=-1)[..., None]
assert np.abs(np.take_along_axis(errors, m, axis=-1)).max() <= 8 * 2**-11

sizes, others = np.geomspace(4, 100, 25), rng.normal(size=(1000, 31)).clip(-4, 4)
lost = []
for size in sizes:
    integers, scales = RULES["q4_0"](np.insert(others, 0, size, axis=1).astype(np.float32))
    lost.append(distance((integers * scales.astype(np.float32))[:, 1:], others).rms_rel)
expected = sizes / 8 / np.sqrt(12)
assert np.allclose(lost[:10], expected[:10] / others.std(), rtol=0.05)
assert lost[-1] == 1

fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
axes[0].hist(errors.ravel(), bins=np.linspace(-1, 1, 81), density=True, color=BLUE)
axes[0].set(xlabel="error in steps", ylabel="density", title="All weights of a matrix")
axes[0].set_xticks(np.linspace(-1, 1, 5))
axes[1].loglog(sizes, expected, "--", color=INK, lw=1, label=r"$s/\sqrt{12}$, $s$ = size / 8")
axes[1].loglog(sizes, lost, "-o", ms=4, color=ORANGE, label="measured")
axes[1].set(xlabel="size of the outlier (others: 1)", ylabel="rms error of the others, relative")
axes[1].set(title="One outlier in a group", ylim=(0.1, 5))
axes[1].set_xticks([4, 10, 30, 100], ["4", "10", "30", "100"])
axes[1].set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
axes[1].minorticks_off()
axes[1].legend()
plt.show()

# %% [markdown]
# ## Rules and group sizes
#
# A smaller group meets fewer outliers, and pays for it: 16 bits of scale are shared by fewer
# weights, so that a weight takes $4 + 16/\text{size}$ bits. And $m \mapsto -8$ is not the best rule
# for a group. `mse` tries several other places for $m$, fits the scale by least squares to each,
# and keeps the best. It costs time once, when the weights are quantised, and no bits.
#
# Files hold groups of 32. For these a `q4_0` group here has the same bytes as one of the `gguf`
# package, which is code of other authors.

# %%
found = {}
print("group  bits  q4_0    mse     mse / q4_0")
for size in (8, 16, 32, 64, 128, 256):
    groups = weights[:128].reshape(-1, size)
    for rule, quantise in RULES.items():
        integers, scales = quantise(groups)
        stored = integers * scales.astype(np.float32)
        found.setdefault(rule, {})[4 + 16 / size] = distance(stored, groups).rms_rel
    plain, fitted = (list(found[rule].values())[-1] for rule in ("q4_0", "mse"))
    print(f"{size:5d}  {4 + 16 / size:<5g} {plain:.4f}  {fitted:.4f}  {fitted / plain:.3f}")
    assert fitted < plain
for errors in found.values():
    assert list(errors.values()) == sorted(errors.values())

kind = gguf.GGMLQuantizationType.Q4_0
theirs = gguf.quants.quantize(weights, kind)
assert np.array_equal(theirs, gdn.q4_to_gguf_blocks(w))
assert np.array_equal(gguf.quants.dequantize(theirs, kind), gdn.dequantize(w))
print(f"\ngguf package: {theirs.size} of {theirs.size} bytes equal")

fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
for (rule, errors), look in zip(found.items(), (("-o", BLUE), ("--s", ORANGE)), strict=True):
    ax.plot(errors.keys(), errors.values(), look[0], ms=5, color=look[1], label=rule)
for size, bits in ((8, 6), (16, 5), (32, 4.5), (64, 4.25)):
    ax.annotate(f"{size}", (bits, found["q4_0"][bits]), (4, 5), textcoords="offset points")
ax.set(xlabel="bits a weight (marked: group size)", ylabel="rms error, relative", ylim=(0, 0.12))
ax.legend(title="normal weights, rule")
plt.show()

# %% [markdown]
# ## 4.5 bits
#
# The three large projections of a layer of Qwen3.5-27B, from their shapes alone:

# %%
big = jax.eval_shape(lambda: gdn.init_params(jax.random.key(0), gdn.PRESETS["qwen3.5-27b"]))
total = {"float32": 0, "int4": 0}
for name in LARGE:
    full = getattr(big, name)
    N, K = full.shape
    small = gdn.Q4Array(
        jax.ShapeDtypeStruct((N, K // 8), jnp.int32),
        jax.ShapeDtypeStruct((N, K // 32), jnp.float16),
    )
    assert small.shape == full.shape
    assert small.nbytes * 8 == 4.5 * full.size
    total["float32"] += full.size * full.dtype.itemsize
    total["int4"] += small.nbytes
    print(
        f"{name:12s}{full.shape!s:14s}{full.size * 4 / 2**20:6.1f} → {small.nbytes / 2**20:.1f} MiB"
    )
print(*(f"{tier}: {count / 2**20:.1f} MiB" for tier, count in total.items()), sep=", ")
assert [round(count / 2**20, 1) for count in total.values()] == [440.0, 61.9]

# %% [markdown]
# ## A layer in int4
#
# Now a small layer. Its three large projections become int4, the six small tensors stay float32. It
# runs the same tokens in three forms, and `trace_step` reads back every operator:
#
# - **float32**: the original weights;
# - **int4**: the quantised ones, multiplied as they are;
# - **twin**: float32 again, with the weights that the int4 stands for. The `gguf` package quantises
#   the original weights and decodes them; none of our code has a part in it.
#
# The oracle computes the same layer in float64, once with the original weights and once with the
# twin's.

# %%
cfg, T = gdn.PRESETS["tiny"], 128
params = gdn.init_params(jax.random.key(0), cfg)
xs = np.asarray(jax.random.normal(jax.random.key(1), (T, cfg.d_model)))
trace_step = jax.jit(gdn.trace_step, static_argnames="cfg")


def run(params):
    state, steps = gdn.init_state(cfg), []
    for x in xs:
        _, state, token = trace_step(params, state, x[None], cfg)
        steps.append(token)
    return {name: np.stack([np.asarray(token[name])[0] for token in steps]) for name in steps[0]}


def in_float64(params):
    return oracle.layer_trace({n: np.asarray(x) for n, x in vars(params).items()}, cfg, xs)


def through_gguf(weights):
    return jnp.asarray(gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind))


large = {name: np.asarray(getattr(params, name)) for name in LARGE}
int4 = {name: gdn.quantize_q4(x) for name, x in large.items()}
twin_params = dataclasses.replace(params, **{n: through_gguf(x) for n, x in large.items()})
f32, q4, twin = run(params), run(dataclasses.replace(params, **int4)), run(twin_params)
exact, exact_twin = in_float64(params), in_float64(twin_params)

print("        int4 to float32                 int4 to twin")
print("entry   max_rel   rms_rel   rms_rel     max_rel   rms_rel   rms_rel")
print(f"{'token':8s}" + f"{1:<10d}{1:<10d}{T:<12d}" * 2)
for name in f32:
    line = ""
    for reference in (f32, twin):
        first, last = (distance(q4[name][t], reference[name][t]) for t in (0, -1))
        line += f"{first.max_rel:.1e}   {first.rms_rel:.1e}   {last.rms_rel:.1e}     "
    print(f"{name:8s}{line.rstrip()}")

# %% [markdown]
# The left half is the **cost**, the right half is the **code**.
#
# The cost enters at three places: in `XC`, in `Z` and in `OUT`, where the three projections are.
# `B`, `A`, `BETA` and `G` come from float32 weights and the same token, so not a bit of them
# differs: how fast a head forgets and how strongly it writes is not touched. In between, the steps
# carry it on:
#
# - SiLU and the norm of $q$ and $k$ hand it through almost as it is.
# - Where two results meet that are both off, and independently so, the squares of their errors add.
#   $S$ is made of $k$ and $v$, `ON` of $S$ and $q$, `OUT` of `ONN` and a quantised matrix.
# - The gated norm brings all heads to one size, so that those with a small output count as much as
#   the others. They are the worse ones.

# %%
for name in ("B", "A", "BETA", "G"):
    assert np.array_equal(q4[name], f32[name])


def rms_rel(out, reference):
    return {name: distance(out[name], reference[name]).rms_rel for name in reference}


def only(name):
    return rms_rel(run(dataclasses.replace(params, **{name: int4[name]})), f32)


def of_one_size(on):
    return on / np.sqrt(np.mean(on**2, axis=-1, keepdims=True))


cost, code = rms_rel(q4, f32), rms_rel(q4, exact_twin)
alone = {name: only(name)["OUT"] for name in LARGE}
print("all tokens:", ", ".join(f"{name} {cost[name]:.3f}" for name in cost if cost[name]))
assert all(code[name] < 1e-6 for name in code)
for before, after in (("XC", "XCV"), ("XCV", "Q"), ("XCV", "K")):
    assert abs(cost[after] / cost[before] - 1) < 0.1

v = slice(2 * cfg.key_dim, None)
meeting = {
    "S": (cost["K"], distance(q4["XCV"][:, v], f32["XCV"][:, v]).rms_rel),
    "ON": (cost["S"], cost["Q"]),
    "OUT": (cost["ONN"], alone["out_proj"]),
}
for name, parts in meeting.items():
    expected = np.hypot(*parts)
    print(f"{name:4s}{cost[name]:.3f}, from the squares of its two parts {expected:.3f}")
    assert abs(expected / cost[name] - 1) < 0.1
level = distance(of_one_size(q4["ON"]), of_one_size(f32["ON"])).rms_rel
print(f"ON  {cost['ON']:.3f}, with all heads of one size {level:.3f}")
assert level > 1.2 * cost["ON"]

# %% [markdown]
# Quantising one projection at a time tells whose error it is. The three are independent too.

# %%
for name, error in alone.items():
    print(f"only {name:12s} OUT rms_rel {error:.3f}")
squares = np.linalg.norm(list(alone.values()))
print(f"root of their squares {squares:.3f}, all three together {cost['OUT']:.3f}")
assert abs(squares / cost["OUT"] - 1) < 0.1
assert max(alone, key=alone.get) == "in_proj_qkv"

# %% [markdown]
# Does the cost grow from token to token, since the state carries it on? The state also forgets, and
# the error of the output and of the state stays level. The distance of the int4 layer to float64
# **with the same weights** stays level too, a million times lower.


# %%
def along(name, reference):
    pairs = zip(q4[name], reference[name], strict=True)
    return np.array([distance(ours, theirs).rms_rel for ours, theirs in pairs])


by_token = {
    "OUT to float32": along("OUT", f32),
    "S to float32": along("S", f32),
    "OUT to float64, same weights": along("OUT", exact_twin),
}
for label, line in by_token.items():
    early, late = line[T // 4 : T // 2].mean(), line[-T // 4 :].mean()
    print(f"{label:29s} tokens {T // 4 + 1} to {T // 2}: {early:.1e}, last {T // 4}: {late:.1e}")
    assert late < 1.5 * early
lower = cost["OUT"] / code["OUT"]
print(f"cost over code: {lower:.0e}")
assert 3e5 < lower < 3e6

moved = [name for name in f32 if cost[name] > 0]
fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
axes[0].semilogy(moved, [cost[name] for name in moved], "o", color=ORANGE, label="to float32")
axes[0].semilogy(moved, [code[n] for n in moved], "s", color=BLUE, label="to float64, same weights")
axes[0].set(title="int4, by operator", ylabel="rms error, relative", ylim=(1e-8, 10))
axes[0].tick_params(axis="x", labelrotation=60)
axes[0].legend(loc="center")
styles = (("-", ORANGE), ("--", PINK), (":", BLUE))
for (label, line), (style, color) in zip(by_token.items(), styles, strict=True):
    axes[1].semilogy(range(1, T + 1), line, style, color=color, label=label)
axes[1].set(title="int4, by token", xlabel="token")
axes[1].legend(loc="center")
plt.show()

# %% [markdown]
# ## Equal numbers that prove nothing
#
# A report might say: "int4 is 0.2339 from our float32 layer and 0.2339 from the independent oracle.
# Two references, one number: the code is right." To see how good that evidence is, plant two
# mistakes, and add a layer that computes nothing and returns noise:
#
# - **neighbour**: each row is read with the scales of the row before it;
# - **bfloat16**: the scales pass through bfloat16 on their way and lose three of their eleven bits.

# %%
plants = {
    "neighbour": lambda scales: jnp.roll(scales, 1, axis=0),
    "bfloat16": lambda scales: scales.astype(jnp.bfloat16).astype(jnp.float16),
}
layers, same_reader = {"right": q4}, {"right": twin}
for mistake, change in plants.items():
    bad = {n: dataclasses.replace(w, scales=change(w.scales)) for n, w in int4.items()}
    layers[mistake] = run(dataclasses.replace(params, **bad))
    shared = {name: gdn.dequantize(w) for name, w in bad.items()}
    same_reader[mistake] = run(dataclasses.replace(params, **shared))


def OUT_error(layer, reference):
    return distance(layer["OUT"], reference["OUT"]).rms_rel


noise = {"OUT": rng.normal(size=f32["OUT"].shape) * f32["OUT"].std()}
between = OUT_error(f32, exact)
print("rms_rel of OUT   to float32     to oracle      difference")
for label, layer in (layers | {"noise": noise}).items():
    near, far = OUT_error(layer, f32), OUT_error(layer, exact)
    print(f"{label:17s}{near:<15.8f}{far:<15.8f}{abs(near - far):.0e}")
    assert abs(near - far) < between * (1 + near)
print(f"\nfloat32 to oracle: {between:.0e}")

w = int4["in_proj_qkv"]
turned = np.mean(np.sign(w.scales) != np.sign(plants["neighbour"](w.scales)))
print(f"scales with another sign than their neighbour's: {turned:.0%}")
assert 0.4 < turned < 0.6
assert OUT_error(layers["neighbour"], f32) > 1
assert abs(OUT_error(layers["bfloat16"], f32) / cost["OUT"] - 1) < 0.01

# %% [markdown]
# In **every** row the two numbers agree to six places, right or wrong, noise included. They must.
# By the triangle inequality they can differ by no more than float32 and the oracle do, and that was
# known to be tiny before any int4 ran. The agreement is about float32 and the oracle. It contains
# nothing about int4.
#
# The size of the number says a little. Half of the neighbour's scales have the wrong sign, and the
# result is as far off as noise: a limit finds that. `verify` has one and calls it
# `q4.magnitude_gate`. But with bfloat16 scales the number is the right one to within a hundredth:
# the price of four bits covers the mistake.
#
# ## What does prove something
#
# Take the price out: compare the int4 layer with a reference that has **the same quantised
# weights**. Then only rounding is left, and a mistake stands out. One condition: the reference must
# come by its weights in another way. A twin that decodes them with the code under suspicion makes
# the same mistake and agrees.

# %%
references = {
    "float32, original weights": dict.fromkeys(layers, f32),
    "float64, original weights": dict.fromkeys(layers, exact),
    "float32, from our own decoder": same_reader,
    "float64, from the gguf package": dict.fromkeys(layers, exact_twin),
}
found = {
    label: [OUT_error(layers[name], reference[name]) for name in layers]
    for label, reference in references.items()
}
print(f"rms_rel of OUT to{'':22s}" + "".join(f"{name:11s}" for name in layers))
for label, errors in found.items():
    print(f"{label:39s}" + "".join(f"{error:<11.1e}" for error in errors))

*_, same, independent = (np.array(errors[1:]) / errors[0] for errors in found.values())
print()
for mistake, times in zip(plants, independent, strict=True):
    bad = layers[mistake]
    start = next(n for n in bad if distance(bad[n][0], exact_twin[n][0]).max_rel > 5e-6)
    print(f"last line, {mistake}: {times:.0e} times the right one's, starts at {start}")
    assert start == "XC"
assert (same < 2).all()
assert independent[0] > 1e6
assert independent[1] > 3e3

fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
looks = (("o", BLUE), ("X", PINK), ("D", ORANGE))
columns = np.transpose(list(found.values()))
for index, (name, (marker, color)) in enumerate(zip(layers, looks, strict=True)):
    rows = np.arange(len(found)) + 0.25 * (index - 1)
    ax.semilogx(columns[index], rows, marker, ms=6, color=color, label=name)
ax.set(xlabel="rms error of OUT, relative", ylim=(len(found) - 0.5, -0.5), xlim=(5e-8, 5))
ax.set_yticks(range(len(found)), [f"to {label}" for label in found])
ax.grid(axis="y", color=INK, alpha=0.3)
fig.legend(loc="outside upper right", ncols=3)
plt.show()

# %% [markdown]
# Only the last line tells right from wrong: by six orders of magnitude for the neighbour's scales,
# by about four for the lost bits. Operator by operator it also says where a mistake starts: at
# `XC`, the first product with an int4 matrix. This is the check `q4.kernel_vs_dequantized` of
# `gdn-jax verify --tier q4`.
#
# ## Two kinds of activations
#
# So far the vector that a matrix is multiplied by was float32. Some systems quantise it as well, to
# eight bits per value with a scale for 32 of them (`Q8_0` in GGUF). `activations="q8"` computes
# that. It is another function of the same weights, not a worse implementation: each agrees with its
# own definition in float64 to rounding, and they differ from each other by what the eight bits
# cost. A comparison with another system has to say which of the two it means.

# %%
eight = gguf.GGMLQuantizationType.Q8_0
W = np.asarray(twin_params.in_proj_qkv, np.float64)
stored = gguf.quants.dequantize(gguf.quants.quantize(xs, eight), eight)
defined = {"f32": xs.astype(np.float64) @ W.T, "q8": stored.astype(np.float64) @ W.T}
ours = {a: np.asarray(gdn.q4_matmul(xs, int4["in_proj_qkv"], activations=a)) for a in defined}
for ran in ours:
    errors = {meant: distance(ours[ran], defined[meant]).rms_rel for meant in defined}
    print(f"ran {ran:4s}", *(f"  meant {meant}: {error:.1e}" for meant, error in errors.items()))
    assert errors.pop(ran) < 1e-6
    assert 1e-3 < errors.popitem()[1] < 2e-2
