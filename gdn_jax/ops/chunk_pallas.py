"""The chunked delta rule on the GPU kernels; its derivatives are those of the XLA form."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from gdn_jax.ops.chunk_xla import Packed, chunked
from gdn_jax.types import Array
from pallas_kernels.kernels.chunk_inside import inside
from pallas_kernels.kernels.chunk_through import Chunks, through
from pallas_kernels.tuning import CHUNK, chunk_stages

FLOAT32_PARTS = 3
"""How many bfloat16 parts keep the 24 bits of a float32."""


def parts_for(*operands: Array) -> int:
    """1 for operands that are all bfloat16, else as many parts as keep a float32."""
    narrow = all(x.dtype == jnp.bfloat16 for x in operands)
    return 1 if narrow else FLOAT32_PARTS


def _chunked(
    parts: int,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: Array,
    S: Array,
    cu_seqlens: Array | None,
) -> tuple[Array, Array]:
    """As :func:`gdn_jax.ops.chunk_xla.chunked` with chunks of 64 and q not yet scaled: o, S.

    Args:
        parts: bfloat16 parts of q, k, v and of every intermediate operand: 1, or 3 for the
            accuracy of float32.
        q, k, v: bfloat16 for one part, else float32; o is like v.
        g, beta, S: float32, as for that function.
        scale: float32 [].
        cu_seqlens: int32 [N + 1] for packed sequences.
    """
    run = functools.partial(_dense if cu_seqlens is None else _packed, parts)
    o, S = sequential_vmap(run)(q, k, v, g, beta, scale, S, cu_seqlens)
    return o, S


chunked_on_kernels = jax.custom_jvp(_chunked, nondiff_argnums=(0,))


@chunked_on_kernels.defjvp
def _derivatives(parts, primals, tangents):
    del parts
    return jax.jvp(_xla, primals, tangents)


def _xla(
    q: Array, k: Array, v: Array, g: Array, beta: Array, scale: Array, S: Array, cu_seqlens: Any
) -> tuple[Array, Array]:
    packed = None if cu_seqlens is None else Packed.of(cu_seqlens, q.shape[1], CHUNK)
    q, k, values = (x.astype(jnp.float32) for x in (q, k, v))
    o, S = chunked(q * scale, k, values, g, beta, S, CHUNK, packed)
    return o.astype(v.dtype), S


def _dense(parts: int, q: Array, k: Array, *others: Any) -> tuple[Array, Array]:
    v, g, beta, scale, S, _ = others
    B, T = q.shape[:2]
    n = -(-T // CHUNK)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, n * CHUNK - T), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(B * n * CHUNK, *x.shape[2:])

    begin = jnp.arange(B + 1, dtype=jnp.int32) * n
    o, S = _run(parts, [cut(x) for x in (q, k, v, g, beta)], begin, scale, S)
    return _joined([part.reshape(B, n * CHUNK, *part.shape[1:])[:, :T] for part in o]), S


def _packed(parts: int, q: Array, k: Array, *others: Any) -> tuple[Array, Array]:
    v, g, beta, scale, S, cu_seqlens = others
    packed = Packed.of(cu_seqlens, q.shape[1], CHUNK)

    def cut(x: Array) -> Array:
        return packed.chunks(x).reshape(-1, *x.shape[2:])

    o, S = _run(parts, [cut(x) for x in (q, k, v, g, beta)], packed.begin, scale, S)
    # Chunks of no sequence are never written: none of them may be read.
    each = [packed.outputs(part.reshape(-1, 1, CHUNK, *part.shape[1:])) for part in o]
    return _joined(each), S


def _run(
    parts: int, operands: list[Array], begin: Array, scale: Array, S: Array
) -> tuple[tuple[Array, ...], Array]:
    """Whole chunks of tokens: q, k [64·n, HK, K], v [64·n, HV, V], g, beta [64·n, HV].

    o is a tuple of its parts.
    """
    q, k, v, g, beta = operands
    g, beta = (jnp.swapaxes(x.reshape(-1, CHUNK, x.shape[-1]), 1, 2) for x in (g, beta))
    G, rest = (jnp.cumsum(g, axis=-1), jnp.zeros_like(g)) if parts == 1 else _exact_sums(g)
    left = jnp.exp((G[..., -1:] - G) + (rest[..., -1:] - rest))
    gates = jnp.stack([G, beta, jnp.exp(G), left, rest], axis=2)
    q, k, v = (_split(x, parts) for x in (q, k, v))
    T, P = inside(q, k, gates, scale)
    chunks, S = Chunks(q, k, v, T, P, gates), jnp.swapaxes(S, 2, 3)
    o, S = through(chunks, begin, scale, S, stages=chunk_stages(parts))
    return tuple(o[n] for n in range(parts)), jnp.swapaxes(S, 2, 3)


def _joined(parts: Sequence[Array]) -> Array:
    """The sum of bfloat16 parts, the smallest first."""
    if len(parts) == 1:
        return parts[0]
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts[::-1]])


def _exact_sums(x: Array) -> tuple[Array, Array]:
    """The running sums of x over the last axis, and what rounding took from each.

    With both, the difference of two long sums is as exact as the numbers between them.
    """

    def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        total = a[0] + b[0]
        of_b = total - a[0]
        rest = (a[0] - (total - of_b)) + (b[0] - of_b) + (a[1] + b[1])
        whole = total + rest
        return whole, rest - (whole - total)

    return lax.associative_scan(add, (x, jnp.zeros_like(x)), axis=x.ndim - 1)


def _split(x: Array, parts: int) -> Array:
    """bfloat16 [parts, ..] whose sum is x, except for what the last part rounds off."""
    if parts == 1:
        return x[None]
    found = []
    for _ in range(parts):
        # XLA would leave out a conversion that is undone at once.
        top = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        found.append(top.astype(jnp.bfloat16))
        x = x - top
    return jnp.stack(found)
