"""Every kernel once at small sizes on a GPU, for compute-sanitizer; exit status 1 if one is wrong.

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    compute-sanitizer --tool memcheck python -m tests.gpu_small

A pool of memory would hide accesses out of bounds, so every array has an allocation of its own.
Tools: memcheck, initcheck, and racecheck with ``--kernel-name kernel_substring=mosaic``. Slots that
no row uses, and a layer that is not stepped, hold NaN.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.layer.pallas import KernelLayer
from gdn_jax.layer.params import LARGE
from gdn_jax.report.metrics import distance
from gdn_jax.verify.draw import draw_inputs, draw_weights
from pallas_kernels import layer, support
from pallas_kernels.kernels import attention_inputs
from pallas_kernels.kernels.residual_norm import residual_norm
from pallas_kernels.place import Place

CONFIGS = (
    (gdn.GDNConfig(128, 1, 3, 128, 128), 1),
    (gdn.GDNConfig(192, 1, 2, 64, 128, conv_width=3), 3),
    (gdn.GDNConfig(128, 1, 2, 128, 64, conv_width=2), 8),
)
LIMIT, NARROW_LIMIT = 5e-6, 2e-2


def params_of(kind: str, weights: dict[str, np.ndarray]) -> gdn.GDNParams:
    """Large weights in float32, bfloat16 or int4."""
    params = gdn.GDNParams(**{name: jnp.asarray(x) for name, x in weights.items()})
    if kind == "float32":
        return params
    if kind == "bfloat16":
        large = {name: getattr(params, name).astype(jnp.bfloat16) for name in LARGE}
        return dataclasses.replace(params, **large)
    large = {name: gdn.quantize_q4(weights[name]) for name in LARGE}
    return gdn.params_to_kernel(dataclasses.replace(params, **large))


def as_float32(w: jax.Array | gdn.Q4Kernel) -> np.ndarray:
    """A weight's values."""
    return np.asarray(
        gdn.dequantize(gdn.from_kernel(w)) if isinstance(w, gdn.Q4Kernel) else w.astype(jnp.float32)
    )


def worst_of_layer(cfg: gdn.GDNConfig, B: int, kind: str) -> float:
    """Distance to float64 of outputs and states; the second of several rows is idle."""
    params = params_of(kind, draw_weights(cfg, 0))
    weights = {f.name: as_float32(getattr(params, f.name)) for f in dataclasses.fields(params)}
    x = np.stack([draw_inputs(cfg, 1, seed)[0] for seed in range(B)])
    slots = np.arange(B, dtype=np.int32)[::-1] + 2
    slots = np.where((np.arange(B) == 1) & (B > 1), -1, slots).astype(np.int32)
    rng = np.random.default_rng(0)
    head = (cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim)
    states = [
        rng.normal(size=(2, B + 3, *part)).astype(np.float32)
        for part in (head, (cfg.conv_width - 1, cfg.conv_dim))
    ]
    for state in states:
        state[0], state[1, np.setdiff1d(np.arange(B + 3), slots)] = np.nan, np.nan
    kernels = KernelLayer(params, cfg)
    place = Place(jnp.ones(1, jnp.int32), jnp.asarray(slots), jnp.asarray(slots))
    parts, S, _, _ = layer.step(
        kernels.weights, jnp.asarray(x), *map(jnp.asarray, states), place, heads=kernels.heads,
        trace=True, clusters=support.has_clusters(),
    )  # fmt: skip
    y, worst = np.asarray(parts).sum(0), 0.0
    for row, slot in enumerate(slots):
        if slot < 0:
            worst = max(worst, float(np.abs(y[row]).max()))
            continue
        before = dict(S=states[0][1, slot], conv_hist=states[1][1, slot])
        ref = oracle.layer_trace(weights, cfg, x[row : row + 1], **before)
        for found, exact in ((y[row], ref["OUT"][0]), (S[1, slot], ref["S"][0])):
            worst = max(worst, distance(np.asarray(found), exact).max_rel)
    return worst


def worst_of_norm(B: int) -> float:
    """Distance to float64 of a residual stream and its norm, in clusters of one, two and eight."""
    rng, worst = np.random.default_rng(0), 0.0
    for D in (128, 768, 1024):
        parts, residual, weight = (
            rng.normal(size=s).astype(np.float32) for s in ((3, B, D), (B, D), (D,))
        )
        x = oracle.wide(parts).sum(0) + residual
        normed = (1 + weight) * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        found = residual_norm(*map(jnp.asarray, (parts, residual, weight)), eps=1e-6)
        for a, b in zip(found, (x, normed), strict=True):
            worst = max(worst, distance(np.asarray(a), b).max_rel)
    return worst


def exact_attention_inputs(
    slices: attention_inputs.Slices,
    norms: attention_inputs.Norms,
    turn: attention_inputs.Turn,
    eps: float,
) -> tuple[np.ndarray, ...]:
    """Queries and gates [B, H, A], keys and values [B, G, A], in float64."""
    q, k, v = (np.asarray(x, np.float64).sum(0) for x in slices)
    cos, sin = (np.asarray(x, np.float64)[:, None] for x in turn)
    B, A, half = len(q), len(norms.q), cos.shape[-1]

    def turned(x: np.ndarray, weight: jax.Array) -> np.ndarray:
        x = (1 + np.asarray(weight)) * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
        a, b, rest = np.split(x, (half, 2 * half), axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    q, gate = np.split(q.reshape(B, -1, 2 * A), 2, axis=-1)
    k, v = (x.reshape(B, -1, A) for x in (k, v))
    return turned(q, norms.q), gate, turned(k, norms.k), v


def worst_of_attention_inputs(B: int) -> float:
    """Distance to float64 of queries, gates, keys and values; the first of several rows is idle."""
    rng, (H, G, N, A, half) = np.random.default_rng(0), (3, 1, 5, 256, 32)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    slices = attention_inputs.Slices(*(normal(2, B, n * A) for n in (2 * H, G, G)))
    norms = attention_inputs.Norms(normal(A), normal(A))
    angles = rng.uniform(0, 6, (B, half))
    turn = attention_inputs.Turn(*(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)))
    place = np.where((np.arange(B) == 0) & (B > 1), -1, np.arange(B) % N).astype(np.int32)
    caches = jnp.full((2, B, G, N, A), jnp.nan)
    given = slices, norms, turn
    found = attention_inputs.attention_inputs(*given, jnp.asarray(place), *caches, eps=1e-6)
    queries, gates, *caches = map(np.asarray, found)
    q, gate, *new = exact_attention_inputs(*given, 1e-6)
    pairs, active = [(queries, q), (gates, gate)], np.flatnonzero(place >= 0)
    for cache, exact in zip(caches, new, strict=True):
        pairs.append((cache[active, :, place[active]], exact[active]))
    left = sum(int(np.isfinite(cache).sum()) for cache in caches) - 2 * len(active) * G * A
    worst = max(distance(found, exact).max_rel for found, exact in pairs)
    return worst if left == 0 else float("inf")


def worst_of_operators(cfg: gdn.GDNConfig, B: int) -> float:
    """Distance to float64 of the delta rule and of the convolution over 3 tokens."""
    rng, T, W = np.random.default_rng(0), 3, cfg.conv_width
    k = rng.normal(size=(B, T, cfg.num_k_heads, cfg.head_k_dim)).astype(np.float32)
    v = rng.normal(size=(B, T, cfg.num_v_heads, cfg.head_v_dim)).astype(np.float32)
    g = np.full((B, T, cfg.num_v_heads), -1, np.float32)
    x, hist = (rng.normal(size=(B, n, cfg.conv_dim)).astype(np.float32) for n in (T, W - 1))
    taps = rng.normal(size=(cfg.conv_dim, W)).astype(np.float32)
    frames = np.concatenate([hist, x], axis=1)
    sums = np.stack([oracle.wide(frames[:, j : j + T]) * taps[:, j] for j in range(W)]).sum(0)
    exact = (
        *oracle.recurrent_gated_delta_rule(k, k, v, g, -g / 2, use_qk_l2norm=True),
        oracle.silu(sums),
        frames[:, T:],
    )
    k, v, g, x, hist, taps = map(jnp.asarray, (k, v, g, x, hist, taps))
    found = (
        *gdn.recurrent_gated_delta_rule(k, k, v, g, -g / 2, use_qk_l2norm=True, backend="pallas"),
        *gdn.causal_conv1d(x, hist, taps, backend="pallas"),
    )
    pairs = zip(found, exact, strict=True)
    return max(distance(np.asarray(a), np.asarray(b)).max_rel for a, b in pairs)


def worst_of_chunks(cfg: gdn.GDNConfig, dtype: str) -> float:
    """Distance to float64 of packed sequences, one of them empty; behind the last there is NaN."""
    rng, at = np.random.default_rng(0), np.array([0, 70, 70, 99], np.int32)
    T = int(at[-1]) + 2
    q, k = rng.normal(size=(2, 1, T, cfg.num_k_heads, cfg.head_k_dim))
    v = rng.normal(size=(1, T, cfg.num_v_heads, cfg.head_v_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -rng.uniform(0, 1, (1, T, cfg.num_v_heads)).astype(np.float32)
    drawn = {"q": q, "k": k, "v": v}
    drawn = {n: np.asarray(x, dtype) for n, x in drawn.items()} | {"g": g, "beta": -g}
    S = rng.normal(size=(3, cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim)).astype(np.float32)
    given: Any = {n: jnp.asarray(x).at[:, at[-1] :].set(jnp.nan) for n, x in drawn.items()}
    o, after = gdn.chunk_gated_delta_rule(
        **given, initial_state=jnp.asarray(S), cu_seqlens=jnp.asarray(at), backend="pallas"
    )
    worst = float(np.abs(np.asarray(o[:, at[-1] :], np.float32)).max())
    worst = max(worst, float(np.abs(np.asarray(after[1]) - S[1]).max()))
    for i in (0, 2):
        own = slice(*at[i : i + 2])
        wide: Any = {n: np.asarray(x[:, own], np.float32) for n, x in drawn.items()}
        exact = oracle.recurrent_gated_delta_rule(**wide, initial_state=S[i : i + 1])
        found = np.asarray(o[:, own], np.float32), np.asarray(after[i : i + 1])
        worst = max(worst, *(distance(a, b).max_rel for a, b in zip(found, exact, strict=True)))
    return worst


def main() -> int:
    """Run everything, one line each."""
    bad = 0
    for cfg, B in CONFIGS:
        runs = {kind: worst_of_layer(cfg, B, kind) for kind in ("float32", "bfloat16", "int4")}
        runs["operators"] = worst_of_operators(cfg, B)
        runs["attention"] = worst_of_attention_inputs(B)
        if support.has_clusters():
            runs["norm"] = worst_of_norm(B)
        if gdn.select_backend("prefill") == "pallas":
            runs["chunks"] = worst_of_chunks(cfg, "float32")
            runs["narrow chunks"] = worst_of_chunks(cfg, "bfloat16")
        for name, worst in runs.items():
            ok = worst <= (NARROW_LIMIT if name.startswith("narrow") else LIMIT)
            bad += not ok
            sizes = f"K {cfg.head_k_dim}, V {cfg.head_v_dim}, W {cfg.conv_width}, B {B}"
            print(f"{'ok' if ok else 'WRONG':6s}{name:13s} {sizes}: {worst:.1e}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
