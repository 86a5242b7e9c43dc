"""The gated delta rule over chunks of tokens: matrix products instead of a loop over tokens.

Inside a chunk, with ``M[i, j] = exp(sum of g over j+1..i)`` for i >= j and 0 above, ``c[i] =
exp(sum of g up to i)`` and the state S before it, the values written are the solution of a
triangular system (the WY form):

    delta[i] = beta[i]·(v[i] - c[i]·Sᵀk[i] - sum_{j<i} M[i, j]·(k[i]·k[j])·delta[j])
    (I + A)·[U, X] = beta·[v, c·k],   A[i, j] = beta[i]·M[i, j]·(k[i]·k[j]) for i > j
    delta = U - X·S
    o[i] = c[i]·Sᵀq[i] + sum_{j<=i} M[i, j]·(q[i]·k[j])·delta[j]
    S <- c[last]·S + sum_j M[last, j]·k[j]⊗delta[j]

Every exponent is a sum of gates between two tokens, never a difference of two long sums: it is
never positive, and exact however strong the decay before it was. The system is solved by forward
substitution, in float32.

Source: Yang, Kautz, Hatamizadeh, arXiv:2412.06464, section 3; Yang et al., arXiv:2406.06484.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax._core.varying import varying_like
from gdn_jax.types import Array

CHUNK_SIZES = (16, 32, 64, 128)

_einsum = functools.partial(
    jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


class Packed(NamedTuple):
    """Where sequences that lie one after another begin and end, in tokens and in chunks of C.

    No chunk has tokens of two sequences. For each of n = ``T // C + N`` chunks, the most that can
    be needed, ``seq`` [n] is its sequence, or N if it is unused; ``first`` and ``last`` [n] say
    whether it is that sequence's first or last; ``tokens`` [n, C] are its tokens, and ``valid``
    [n, C] says which of them exist. For each token, ``place`` [T] is the position of its output
    among those of all chunks, and ``known`` [T] says whether it belongs to a sequence. ``begin``
    [N + 1] is the first chunk of each sequence, then the end of the last one's chunks.
    """

    begin: Array
    seq: Array
    first: Array
    last: Array
    tokens: Array
    valid: Array
    place: Array
    known: Array

    @classmethod
    def of(cls, cu_seqlens: Array, T: int, C: int) -> "Packed":
        """From the N + 1 places where sequences begin and the last one ends."""
        N = cu_seqlens.shape[0] - 1
        chunks = -(-jnp.diff(cu_seqlens) // C)
        begin = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(chunks, dtype=jnp.int32)])
        chunk = jnp.arange(T // C + N, dtype=jnp.int32)
        seq = _sequence(begin, chunk)
        inside, own = seq < N, jnp.minimum(seq, N - 1)
        tokens = (cu_seqlens[own] + (chunk - begin[own]) * C)[:, None] + jnp.arange(C)[None]
        valid = inside[:, None] & (tokens < cu_seqlens[own + 1][:, None])
        t = jnp.arange(T, dtype=jnp.int32)
        of_token = _sequence(cu_seqlens, t)
        known, of_token = of_token < N, jnp.minimum(of_token, N - 1)
        place = begin[of_token] * C + t - cu_seqlens[of_token]
        first = inside & (chunk == begin[own])
        last = inside & (chunk == begin[own + 1] - 1)
        return cls(begin, jnp.where(inside, seq, N), first, last, tokens, valid, place, known)

    def chunks(self, x: Array) -> Array:
        """[1, T, ..] -> [n, 1, C, ..], zeros where a chunk has no token."""
        x = x[0, jnp.minimum(self.tokens, x.shape[1] - 1)]
        return jnp.where(_wide(self.valid, x), x, 0)[:, None]

    def outputs(self, o: Array) -> Array:
        """[n, 1, C, ..] -> [1, T, ..]."""
        flat = o.reshape(-1, *o.shape[3:])
        o = flat[jnp.minimum(self.place, len(flat) - 1)]
        return jnp.where(_wide(self.known, o), o, 0)[None]


def chunked(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array, C: int, packed: Packed | None
) -> tuple[Array, Array]:
    """Outputs [B, T, HV, V] and the state after the last token, float32.

    Args:
        q, k: float32 [B, T, HK, K], normalised and scaled.
        v: float32 [B, T, HV, V].
        g, beta: float32 [B, T, HV].
        S: float32 [B, HV, K, V], or [N, HV, K, V] for N packed sequences.
        C: tokens of a chunk.
        packed: if B is 1 and T holds several sequences.
    """
    T, HK, (HV, V) = q.shape[1], q.shape[2], v.shape[2:]
    G = HV // HK
    split = functools.partial(_split, C=C) if packed is None else packed.chunks
    q, k, v, g, beta = (split(x) for x in (q, k, v, g, beta))
    # Heads before tokens: [n, B, HK, C, K], and for value heads [n, B, HK, G, C, ..].
    q, k = (jnp.moveaxis(x, 2, 3) for x in (q, k))
    v, g, beta = (
        jnp.moveaxis(x.reshape(*x.shape[:3], HK, G, *x.shape[4:]), 2, 4) for x in (v, g, beta)
    )
    parts = jax.vmap(jax.checkpoint(_inside))(q, k, v, g, beta)
    S = varying_like(S.reshape(-1, HK, G, *S.shape[2:]), parts, packed)
    with jax.named_scope("chunks"):
        if packed is None:
            S, o = lax.scan(jax.checkpoint(_through), S, parts)
        else:
            S, o = _through_packed(S, parts, packed)
    o = jnp.moveaxis(o.reshape(*o.shape[:2], HV, C, V), 2, 3)
    S = S.reshape(-1, HV, *S.shape[3:])
    if packed is not None:
        return packed.outputs(o), S
    return jnp.moveaxis(o, 0, 1).reshape(o.shape[1], -1, HV, V)[:, :T], S


class _Inside(NamedTuple):
    """What a chunk computes without the state; see the equations above."""

    U: Array
    X: Array
    scores: Array
    q: Array
    k: Array
    decay: Array


def _inside(q: Array, k: Array, v: Array, g: Array, beta: Array) -> _Inside:
    C = q.shape[-2]
    before = jnp.tril(jnp.ones((C, C), bool), -1)
    M = _decays(g)
    own, beta = jnp.exp(jnp.cumsum(g, axis=-1)), beta[..., None]
    kk, qk = (_einsum("bhik,bhjk->bhij", x, k)[:, :, None] for x in (k, q))
    A = jnp.where(before, beta * M * kk, 0)
    keys = k[:, :, None]
    right = beta * jnp.concatenate([v, own[..., None] * keys], axis=-1)
    solved = lax.linalg.triangular_solve(A, right, left_side=True, lower=True, unit_diagonal=True)
    U, X = jnp.split(solved, [v.shape[-1]], axis=-1)
    return _Inside(
        U, X, M * qk, own[..., None] * q[:, :, None], M[..., -1, :, None] * keys, own[..., -1]
    )


def _decays(g: Array) -> Array:
    """M [.., C, C] of gates [.., C]: 0 above the diagonal, 1 on it."""
    C = g.shape[-1]
    below = jnp.tril(jnp.ones((C, C), bool), -1)
    # Column j sums only the gates after token j.
    gates = jnp.where(below, g[..., :, None], 0)
    # Masked before the exponential, whose gradient would otherwise be 0·inf.
    return jnp.exp(jnp.where(below | jnp.eye(C, dtype=bool), jnp.cumsum(gates, axis=-2), -jnp.inf))


def _through(S: Array, part: _Inside) -> tuple[Array, Array]:
    """One chunk: the state after it, and its outputs [B, HK, G, C, V]."""
    delta = part.U - _einsum("bhgck,bhgkv->bhgcv", part.X, S)
    o = _einsum("bhgck,bhgkv->bhgcv", part.q, S)
    o += _einsum("bhgij,bhgjv->bhgiv", part.scores, delta)
    written = _einsum("bhgck,bhgcv->bhgkv", part.k, delta)
    return part.decay[..., None, None] * S + written, o


def _through_packed(starts: Array, parts: _Inside, packed: Packed) -> tuple[Array, Array]:
    """As :func:`_through` for all chunks, each sequence from its own state: states, outputs."""
    N = len(starts)

    @jax.checkpoint
    def body(carry: tuple[Array, Array], chunk: Any) -> tuple[tuple[Array, Array], Array]:
        S, ends = carry
        part, seq, first, last = chunk
        S = jnp.where(first, starts[jnp.minimum(seq, N - 1)][None], S)
        S, o = _through(S, part)
        ends = ends.at[jnp.where(last, seq, N)].set(S[0], mode="drop")
        return (S, ends), o

    chunks = (parts, packed.seq, packed.first, packed.last)
    (_, ends), o = lax.scan(
        body, varying_like((jnp.zeros_like(starts[:1]), starts), starts), chunks
    )
    return ends, o


def _split(x: Array, C: int) -> Array:
    """[B, T, ..] -> [n, B, C, ..], zeros after the last token, which neither decay nor write."""
    B, T = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, -T % C), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), 1, 0)


def _sequence(begin: Array, x: Array) -> Array:
    """The interval of ``begin`` [N + 1] that holds each x, never an empty one; N beyond them."""
    return jnp.searchsorted(begin[1:], x, side="right").astype(jnp.int32)


def _wide(mask: Array, like: Array) -> Array:
    return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))
