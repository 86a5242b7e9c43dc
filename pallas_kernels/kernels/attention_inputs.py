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
from pallas_kernels.mosaic.mlir import sync
from pallas_kernels.place import settled

WIDTHS = (128, 256)
"""Widths A of a head that the kernel is written for."""
HALVES = (32, 64)
"""Numbers of pairs that are turned, R/2, that the kernel is written for."""
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
    cta = _Cta(eps, interpreted, *refs)
    i, H, G = cta.i, cta.H, cta.G
    branches: list[tuple[Any, Callable[[], None]]] = [
        (i < H, cta.query),
        ((i >= H) & (i < H + G), cta.key),
        (i >= H + G, cta.value),
    ]
    for condition, run in branches:
        pl.when(condition)(run)


class _Cta:
    """One CTA while it is traced: row ``b`` and ``i``, a query, a key or a value head."""

    def __init__(self, eps: float, interpreted: bool, *refs: Any) -> None:
        self.eps, self.interpreted = eps, interpreted
        self.slices, self.norms, self.turn = Slices(*refs[:3]), Norms(*refs[3:5]), Turn(*refs[5:7])
        place, self.k_cache, self.v_cache, self.queries, self.gates = refs[7:12]
        self.squares, self.held = refs[12:]
        (self.H, self.A), self.G = self.queries.shape[1:], self.k_cache.shape[1]
        self.i, self.b = lax.axis_index("head"), lax.axis_index("row")
        self.at = place[self.b]
        self.pieces = [pl.ds(n, PIECE) for n in range(0, self.A, PIECE)]

    def query(self) -> None:
        """Query i and its gate."""
        q, A, i = self.slices.q, self.A, self.i
        xs, gate = self._total(q, 2 * A * i), self._total(q, 2 * A * i + A)
        for piece, x in zip(self.pieces, gate, strict=True):
            self.gates[self.b, self.i, piece] = x
        for start, x in self._turned(self._normed(xs, self.norms.q)):
            self.queries[self.b, self.i, pl.ds(start, x.size)] = x.astype(self.queries.dtype)

    def key(self) -> None:
        """Key i - H."""
        xs = self._total(self.slices.k, self.A * (self.i - self.H))
        turned = list(self._turned(self._normed(xs, self.norms.k)))
        self._keep(self.k_cache, self.i - self.H, turned)

    def value(self) -> None:
        """Value i - H - G, which has no norm and is not turned."""
        h = self.i - self.H - self.G
        xs = self._total(self.slices.v, self.A * h)
        self._keep(self.v_cache, h, [(p.start, x) for p, x in zip(self.pieces, xs, strict=True)])

    def _total(self, ref: Any, first: Any) -> list[jax.Array]:
        """The sums of a head's slices: pieces [128]."""
        layout, totals = channels(PIECE), []
        for piece in self.pieces:
            at = [(s, self.b, pl.ds(first + piece.start, PIECE)) for s in range(ref.shape[0])]
            totals.append(functools.reduce(operator.add, [load(ref.at[x], layout) for x in at]))
        return totals

    def _normed(self, xs: list[jax.Array], weight: Any) -> Any:
        """The head with its norm [A], in shared memory, where threads find each other's numbers."""
        self.squares[...] = functools.reduce(operator.add, [x * x for x in xs])
        sync(self.interpreted)
        square = jnp.sum(load(self.squares, in_every_warp(PIECE)))
        factor = rsqrt(square / self.A + self.eps)
        for piece, x in zip(self.pieces, xs, strict=True):
            self.held[piece] = (1.0 + load(weight.at[piece], channels(PIECE))) * (x * factor)
        sync(self.interpreted)
        return self.held

    def _turned(self, head: Any) -> Iterator[tuple[int, jax.Array]]:
        """The head with its first R numbers turned: parts, and where each begins."""

        def part(ref: Any, first: int, size: int) -> jax.Array:
            return load(ref.at[pl.ds(first, size)], channels(size))

        half = self.turn.cos.shape[1]
        x, y = part(head, 0, half), part(head, half, half)  # [R/2] each
        c, s = (part(ref.at[self.b], 0, half) for ref in self.turn)  # [R/2] each
        yield 0, x * c - y * s
        yield half, y * c + x * s
        first = 2 * half
        while first < self.A:
            size = PIECE if self.A - first >= PIECE else 64
            yield first, part(head, first, size)
            first += size

    def _keep(self, cache: Any, h: Any, parts: list[tuple[Any, jax.Array]]) -> None:
        """Parts of a head in the row's place of its cache, if it has one."""

        def store() -> None:
            for first, x in parts:
                cache[self.b, h, self.at, pl.ds(first, x.size)] = x.astype(cache.dtype)

        pl.when(self.at >= 0)(store)
