"""Matrix products of one or a few rows, and what reading their int4 weights costs by itself."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax._core.backend import Matrix, choose
from gdn_jax.bench import kernels
from gdn_jax.bench.workload import Prepared, Workload, links_for, poisoned, rounds_for, walked
from gdn_jax.config import GDNConfig
from gdn_jax.quant import dense
from gdn_jax.quant.kernel_layout import to_kernel
from gdn_jax.quant.q4_matmul import q4_matmul
from gdn_jax.quant.q4array import GROUP, SHIFTS, Q4Array
from gdn_jax.report.metrics import distance, unequal

Product = Callable[[jax.Array, Any], jax.Array]

BITS = {"int4": 4.5, "stream": 4.5, "float32": 32, "bfloat16": 16}
"""Of a weight."""
_INT4 = ("int4", "stream")


def shapes(cfg: GDNConfig) -> tuple[tuple[int, int], ...]:
    """[N, K] of the input projections qkv and z together, and of the output projection."""
    return (cfg.conv_dim + cfg.value_dim, cfg.d_model), (cfg.d_model, cfg.value_dim)


def int4(cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]) -> Iterator[Workload]:
    """The public int4 product: weights in the exchange form for XLA, else in the kernels' layout.

    The rows of a shape begin with the kernel that reads the same blocks and only adds their words.
    """
    for N, K in shapes(cfg):
        if "pallas" in backends:
            reading = _workload("stream", "pallas", N, K, 1, 1, kernels.read_words)
            moved = int(N * K * BITS["stream"] / 8)
            changes = {"limit": 0, "unit": "unequal elements", "flops": 0, "bytes": moved}
            yield dataclasses.replace(reading, **changes)
        for batch, backend in itertools.product(batches, backends):
            function = functools.partial(q4_matmul, backend=backend)
            yield _workload("int4", backend, N, K, batch, max(batches), function)


def floats(cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]) -> Iterator[Workload]:
    """Products of float weights with float32 rows, summed in float32."""
    for kernel, (N, K) in itertools.product(("float32", "bfloat16"), shapes(cfg)):
        for batch, backend in itertools.product(batches, backends):
            function = dense.matmul if backend == "xla" else kernels.float_product
            yield _workload(kernel, backend, N, K, batch, max(batches), function)


def _workload(
    kernel: str, backend: str, N: int, K: int, batch: int, rows: int, function: Product
) -> Workload:
    nbytes = int(N * K * BITS[kernel] / 8)
    links = links_for(nbytes)
    rounds = rounds_for(nbytes, links)

    def make() -> Prepared:
        packed = backend == "pallas" and kernel in _INT4
        obstacle = kernels.read_reason(nbytes // 4) if kernel == "stream" else None
        weight = Matrix("w", (N, K), int4=packed)
        choose("q4_matmul", weights=[weight], backend=backend, obstacle=obstacle)
        x = jnp.asarray(draw_rows(rows, K)[:batch])
        drawn = (draw(kernel, N, K, link) for link in range(links))
        weights = [jax.jit(to_kernel)(w) if packed else w for w in drawn]
        one = jax.jit(function)
        first = np.asarray(poisoned(one, x, weights[0]))
        chained = first.copy()
        chain = jax.jit(functools.partial(_chain, one, rounds))
        chained.flat[0] = np.asarray(poisoned(chain, x, weights))[0]

        def check() -> float:
            if kernel == "stream":
                words = np.asarray(weights[0].blocks).reshape(len(first), -1)
                exact = words.sum(axis=1, dtype=np.int32)
                return unequal(first, exact) + unequal(chained, exact)
            exact = exact_product(kernel, N, K, rows)[:batch]
            return max(distance(y, exact).max_rel for y in (first, chained))

        return Prepared(check, lambda _: chain(x, weights), None)

    moved, flops = nbytes + 4 * batch * (N + K), 2 * batch * N * K
    return Workload(kernel, backend, f"{N}x{K}", batch, moved, flops, links * rounds, make)


def _chain(one: Product, rounds: int, x: jax.Array, weights: Sequence[Any]) -> jax.Array:
    """One product after the other; an element of each is used, so the compiler leaves none out."""

    def walk(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, kept = carry[0], []
        for w in weights:
            x, y = lax.optimization_barrier((x, one(x, w)))
            kept.append(y.ravel()[0])
        return x, jnp.stack(kept)

    kind = jax.eval_shape(one, x, weights[0]).dtype
    return walked(walk, (x, jnp.zeros(len(weights), kind)), rounds)[1]


def draw_rows(rows: int, K: int) -> np.ndarray:
    """Normal float32 rows [rows, K]; two columns in a hundred are twenty times as large."""
    x = np.random.default_rng(0).normal(size=(rows, K))
    x[:, np.random.default_rng(1).integers(0, K, max(1, K // 50))] *= 20
    return x.astype(np.float32)


def draw(kernel: str, N: int, K: int, link: int) -> Any:
    """Weights of a link, drawn on the device."""
    key = jax.random.key(link)
    return draw_q4(N, K, key) if kernel in _INT4 else draw_floats(N, K, kernel, key)


@functools.lru_cache
def exact_product(kernel: str, N: int, K: int, rows: int) -> np.ndarray:
    """``w·x`` of the first link in float64, for all rows."""
    exact = integers if kernel == "int4" else wide
    return draw_rows(rows, K).astype(np.float64) @ exact(draw(kernel, N, K, 0)).T


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw_floats(N: int, K: int, dtype: Any, key: jax.Array) -> jax.Array:
    """Normal weights [N, K] of standard deviation K**-0.5."""
    return (jax.random.normal(key, (N, K)) * K**-0.5).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw_q4(N: int, K: int, key: jax.Array) -> Q4Array:
    """Random words and scales of either sign, drawn on the device; weights of about K**-0.5."""
    bits, sizes, signs = jax.random.split(key, 3)
    words = jax.random.bits(bits, (N, K // 8), jnp.uint32)
    scales = jax.random.uniform(sizes, (N, K // GROUP), minval=0.1, maxval=0.3) * K**-0.5
    scales = jnp.where(jax.random.bernoulli(signs, shape=scales.shape), scales, -scales)
    return Q4Array(lax.bitcast_convert_type(words, jnp.int32), scales.astype(jnp.float16))


def integers(w: Q4Array) -> np.ndarray:
    """``integer · scale`` in float64 by NumPy, from the definition of Q4Array."""
    packed, scales = np.asarray(w.packed), np.asarray(w.scales)
    words = packed.reshape(*scales.shape, 1, -1, 1)
    nibbles = ((words << (28 - SHIFTS[:, None, :])) >> 28).reshape(*scales.shape, GROUP)
    return (nibbles * scales[..., None].astype(np.float64)).reshape(w.shape)


def wide(w: jax.Array) -> np.ndarray:
    """Any float weights in float64."""
    return np.asarray(w).astype(np.float64)
