"""One token's queries, gates, keys and values of gated attention, ready for the attention itself.

Grid: a CTA of 128 threads for a row and a head: H queries with their gates, G keys, G values. It
adds up the head's K slices, takes the norm of a query or a key, turns its first R numbers, and puts
keys and values straight into their caches. What is turned passes through shared memory, where
number i meets number i + R/2.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.layouts import channels, in_every_warp, load, rsqrt
from pallas_kernels.mosaic.mlir import barrier
from pallas_kernels.place import settled

WIDTHS = (128, 256)
"""Of a head."""
HALVES = (32, 64)
"""Of what is turned: R/2."""
PIECE = 128
"""Numbers that a CTA takes at once, one a thread."""


class Slices(NamedTuple):
    """K slices of the projections, float32 [splits, B, N].

    ``q`` gives each of H heads its query and then its gate, N = 2·H·A; ``k`` and ``v`` have G·A.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Norms(NamedTuple):
    """Weights float32 [A] of the norms of queries and keys, ``(1 + w)·x·rsqrt(mean(x²) + eps)``."""

    q: jax.Array
    k: jax.Array


class Turn(NamedTuple):
    """The token's angles: ``cos`` and ``sin`` float32 [B, R/2]."""

    cos: jax.Array
    sin: jax.Array


def unavailable_reason(A: int, R: int) -> str | None:
    """Why the kernel cannot take heads of A numbers of which R are turned; None when it can."""
    if A in WIDTHS and R // 2 in HALVES and R % 2 == 0:
        return None
    return f"heads of {A} of which {R} are turned; the kernel needs 128 or 256, and 64 or 128"


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def attention_inputs(
    slices: Slices,
    norms: Norms,
    turn: Turn,
    place: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries [B, H, A] of the caches' type, gates float32 [B, H, A], and the two caches.

    Args:
        slices: of the projections; N is a multiple of A.
        norms: of queries and keys.
        turn: angles of every row's position; pairs are (i, i + R/2).
        place: int32 [B], where in the caches keys and values are put; nowhere if negative.
        k_cache, v_cache: [B, G, N, A], float32 or bfloat16; updated in place where XLA may.
        eps: of the norms.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.
    """
    B, G, _, A = k_cache.shape
    H = slices.q.shape[2] // (2 * A)
    kernel = plgpu.kernel(
        functools.partial(_body, eps, interpret is not None),
        out_type=[
            jax.ShapeDtypeStruct((B, H, A), k_cache.dtype),
            jax.ShapeDtypeStruct((B, H, A), jnp.float32),
        ],
        grid=(H + 2 * G, B),
        grid_names=("head", "row"),
        scratch_types=[plgpu.SMEM((PIECE,), jnp.float32), plgpu.SMEM((A,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="attention_inputs",
    )
    caches = jax.new_ref(k_cache), jax.new_ref(v_cache)
    queries, gates = kernel(*slices, *norms, *turn, place, *caches)
    k_cache, v_cache = settled(*(cache[...] for cache in caches))
    return queries, gates, k_cache, v_cache


def _body(eps: float, interpreted: bool, *refs: Any) -> None:
    *projected, q_norm, k_norm, cos, sin, place, k_cache, v_cache = refs[:10]
    q, k, v = projected
    queries, gates, squares, held = refs[10:]
    (H, A), G, half = queries.shape[1:], k_cache.shape[1], cos.shape[1]
    i, b = lax.axis_index("head"), lax.axis_index("row")
    at, pieces = place[b], [pl.ds(n, PIECE) for n in range(0, A, PIECE)]

    def sync() -> None:
        if not interpreted:
            barrier()

    def total(ref: Any, first: Any) -> list[jax.Array]:
        """The sums of a head's slices, in pieces."""
        return [
            functools.reduce(
                operator.add,
                [
                    load(ref.at[s, b, pl.ds(first + piece.start, PIECE)], channels(PIECE))
                    for s in range(ref.shape[0])
                ],
            )
            for piece in pieces
        ]

    def turned(xs: list[jax.Array], weight: Any) -> Iterator[tuple[int, jax.Array]]:
        """The head with its norm, turned: parts, and where each begins."""
        squares[...] = functools.reduce(operator.add, [x * x for x in xs])
        sync()
        factor = rsqrt(jnp.sum(load(squares, in_every_warp(PIECE))) / A + eps)
        for piece, x in zip(pieces, xs, strict=True):
            held[piece] = (1.0 + load(weight.at[piece], channels(PIECE))) * (x * factor)
        sync()

        def part(ref: Any, first: int, size: int) -> jax.Array:
            return load(ref.at[pl.ds(first, size)], channels(size))

        x, y = part(held, 0, half), part(held, half, half)
        c, s = (part(ref.at[b], 0, half) for ref in (cos, sin))
        yield 0, x * c - y * s
        yield half, y * c + x * s
        first = 2 * half
        while first < A:
            size = PIECE if A - first >= PIECE else 64
            yield first, part(held, first, size)
            first += size

    def keep(cache: Any, h: Any, parts: Any) -> None:
        """Parts of a head in the row's place of its cache."""

        def store() -> None:
            for first, x in parts:
                cache[b, h, at, pl.ds(first, x.size)] = x.astype(cache.dtype)

        pl.when(at >= 0)(store)

    def query() -> None:
        xs, gate = total(q, 2 * A * i), total(q, 2 * A * i + A)
        for piece, x in zip(pieces, gate, strict=True):
            gates[b, i, piece] = x
        for first, x in turned(xs, q_norm):
            queries[b, i, pl.ds(first, x.size)] = x.astype(queries.dtype)

    def key() -> None:
        keep(k_cache, i - H, list(turned(total(k, A * (i - H)), k_norm)))

    def value() -> None:
        h = i - H - G
        keep(v_cache, h, [(p.start, x) for p, x in zip(pieces, total(v, A * h), strict=True)])

    branches: list[tuple[Any, Callable[[], None]]] = [
        (i < H, query),
        ((i >= H) & (i < H + G), key),
        (i >= H + G, value),
    ]
    for condition, run in branches:
        pl.when(condition)(run)
