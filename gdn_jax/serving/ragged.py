"""The middle of a layer for an engine that holds the states itself: rows of any length, one call.

The argument names are those of the engines that call such an interface on TPUs.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gdn_jax._core.checks import FLOATS, check_array
from gdn_jax.errors import ShapeError, SlotError
from gdn_jax.layer.state import GDNState
from gdn_jax.ops.chunk import chunk_gated_delta_rule
from gdn_jax.ops.delta_rule import recurrent_gated_delta_rule
from gdn_jax.ops.gates import gates
from gdn_jax.serving.rows import read_rows, write_rows
from gdn_jax.types import Array


class _Rows(NamedTuple):
    """Where rows lie among the tokens: ``begin``, ``length``, and ``live``: not idle."""

    begin: Array
    length: Array
    live: Array


def ragged_gated_delta_rule(
    mixed_qkv: Array,
    b: Array,
    a: Array,
    conv_state: Array,
    recurrent_state: Array,
    *,
    conv_weight: Array,
    A_log: Array,
    dt_bias: Array,
    query_start_loc: Array,
    state_indices: Array,
    has_initial_state: Array,
    max_query_len: int | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
) -> tuple[Array, Array, Array]:
    """Convolution, gates and delta rule of a layer for R rows, from and to N slots of states.

    Steps 2 to 5 of :mod:`gdn_jax.layer.steps` for each row by itself, whatever its length: prompts,
    parts of prompts and single tokens together. A row starts from the state in its slot and leaves
    the new state there, so that a sequence may be split over calls anywhere. R and T are static,
    the numbers in the arrays are not. Jit it with both states donated for an update in place.

    Args:
        mixed_qkv: [T, C], the projections q, k, v of all rows' tokens one after another, float32,
            bfloat16 or float16, C = 2·HK·K + HV·V; computed in float32.
        b, a: [T, HV], the inputs of the gates, in any of these dtypes.
        conv_state: [N, W-1, C], the last inputs, oldest first; float32 or mixed_qkv's dtype.
        recurrent_state: [N, HV, K, V] float32. Its shape gives HV, K and V, and with C also HK.
        conv_weight: [C, W] float32, tap j for window entry j, oldest first.
        A_log, dt_bias: [HV] float32.
        query_start_loc: int32 [R + 1]: row r has the tokens ``query_start_loc[r]`` to
            ``query_start_loc[r + 1] - 1``. A row without tokens keeps its state. Tokens after the
            last row are padding: their output is zero, whatever they hold.
        state_indices: int32 [R], the rows' slots; -1 is an idle row, which reads and writes nothing
            and whose outputs are zero. No slot may be named by two rows.
        has_initial_state: bool [R]; where False, a row starts from zeros, whatever its slot holds.
        max_query_len: static; the most tokens that a row may have, if known. With 1 the
            recurrent rule runs, one step for each row, instead of chunks.
        chunk_size, backend: of the rule, as for :func:`gdn_jax.chunk_gated_delta_rule` and
            :func:`gdn_jax.recurrent_gated_delta_rule`.

    Returns:
        o [T, HV, V] in mixed_qkv's dtype, rounded once, and both states. Slots that no row writes
        keep every bit.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype, T = 0, another chunk size, or,
            unless traced, ``query_start_loc`` that does not begin at 0, goes down or ends beyond
            T, or a row longer than ``max_query_len``.
        SlotError: a slot that is out of range or named twice, unless traced.
        BackendUnavailableError: the named backend cannot run here.
    """
    op = "ragged_gated_delta_rule"
    keys = _check_arrays(op, mixed_qkv, b, a, conv_state, recurrent_state)
    _check_weights(op, mixed_qkv.shape[1], conv_state, recurrent_state, conv_weight, A_log, dt_bias)
    _check_rows(op, query_start_loc, state_indices, has_initial_state, mixed_qkv, conv_state)
    if max_query_len is not None:
        _check_lengths(op, query_start_loc, max_query_len)
    begin, slots = jnp.asarray(query_start_loc), jnp.asarray(state_indices)
    rows = _Rows(begin[:-1], jnp.diff(begin), slots >= 0)
    pool = GDNState(jnp.asarray(recurrent_state)[None], jnp.asarray(conv_state)[None])
    start = read_rows(pool, 0, jnp.where(jnp.asarray(has_initial_state), slots, -1))
    start = jax.tree.map(lambda x: x.astype(jnp.float32), start)
    qkv, b, a = (jnp.asarray(x, jnp.float32) for x in (mixed_qkv, b, a))
    beta, g = gates(b, a, jnp.asarray(A_log), jnp.asarray(dt_bias))
    conv_weight = jnp.asarray(conv_weight)
    with jax.named_scope(op):
        if max_query_len == 1:
            o, state = _one_token(qkv, beta, g, start, conv_weight, rows, keys, backend)
        else:
            rule = functools.partial(
                chunk_gated_delta_rule, cu_seqlens=begin, chunk_size=chunk_size, backend=backend
            )
            o, state = _any_length(qkv, beta, g, start, conv_weight, rows, keys, rule)
        hist = state.conv_hist.astype(conv_state.dtype)
        written = jnp.where(rows.length > 0, slots, -1)
        pool = write_rows(pool, 0, written, GDNState(state.S, hist))
    return o.astype(mixed_qkv.dtype), pool.conv_hist[0], pool.S[0]


def _any_length(
    qkv: Array,
    beta: Array,
    g: Array,
    start: GDNState,
    weight: Array,
    rows: _Rows,
    keys: tuple[int, int],
    rule: Any,
) -> tuple[Array, GDNState]:
    T, R = len(qkv), len(rows.begin)
    t = jnp.arange(T, dtype=jnp.int32)
    row = jnp.searchsorted(rows.begin + rows.length, t, side="right").astype(jnp.int32)
    known, row = row < R, jnp.minimum(row, R - 1)
    known = (known & rows.live[row])[:, None]
    # NaN times a beta of zero would still be NaN.
    qkv, beta, g = (jnp.where(known, x, 0) for x in (qkv, beta, g))
    out, hist = _packed_conv(qkv, start.conv_hist, weight, rows, row)
    q, k, v = (x[None] for x in _heads(out, start.S, keys))
    o, S = rule(q, k, v, g[None], beta[None], initial_state=start.S, use_qk_l2norm=True)
    return jnp.where(known[..., None], o[0], 0), GDNState(S, hist)


def _packed_conv(
    x: Array, hist: Array, weight: Array, rows: _Rows, row: Array
) -> tuple[Array, Array]:
    """Convolution and SiLU of packed tokens x [T, C], each row after its own hist [R, W-1, C]."""
    T, past = len(x), hist.shape[1]
    place = jnp.arange(T, dtype=jnp.int32) - rows.begin[row]

    def tap(j: int) -> Array:
        """Entry j of every token's window: an earlier token, or a frame of the history."""
        back = past - j
        if back == 0:
            return x
        before = jnp.pad(x, ((back, 0), (0, 0)))[:T]
        old = hist[row, jnp.minimum(place + j, past - 1)]
        return jnp.where((place >= back)[:, None], before, old)

    total = functools.reduce(operator.add, (tap(j) * weight[None, :, j] for j in range(past + 1)))
    # Frame i of the new history is entry length + i of [history; tokens].
    entry = rows.length[:, None] + jnp.arange(past, dtype=jnp.int32)[None]
    new = x[jnp.clip(rows.begin[:, None] + entry - past, 0, T - 1)]
    old = jnp.take_along_axis(hist, jnp.minimum(entry, past - 1)[..., None], axis=1)
    return jax.nn.silu(total), jnp.where((entry >= past)[..., None], new, old)


def _one_token(
    qkv: Array,
    beta: Array,
    g: Array,
    start: GDNState,
    weight: Array,
    rows: _Rows,
    keys: tuple[int, int],
    backend: str | None,
) -> tuple[Array, GDNState]:
    T = len(qkv)
    has_token = rows.live & (rows.length > 0)
    token = jnp.minimum(rows.begin, T - 1)
    qkv, beta, g = (jnp.where(has_token[:, None], x[token], 0) for x in (qkv, beta, g))
    window = jnp.concatenate([start.conv_hist, qkv[:, None]], axis=1)
    out = jax.nn.silu(jnp.sum(window * weight.T[None], axis=1))
    operands = (x[:, None] for x in (*_heads(out, start.S, keys), g, beta))
    o, S = recurrent_gated_delta_rule(
        *operands, initial_state=start.S, use_qk_l2norm=True, backend=backend
    )
    where = jnp.where(has_token, token, T)
    every = jnp.zeros((T, *o.shape[2:]), jnp.float32).at[where].set(o[:, 0], mode="drop")
    return every, GDNState(S, window[:, 1:])


def _heads(out: Array, S: Array, keys: tuple[int, int]) -> tuple[Array, Array, Array]:
    """q, k [.., HK, K] and v [.., HV, V] of convolved channels [.., C]."""
    HK, K = keys
    q, k, v = jnp.split(out, (HK * K, 2 * HK * K), axis=-1)
    q, k = (x.reshape(*x.shape[:-1], HK, K) for x in (q, k))
    return q, k, v.reshape(*v.shape[:-1], S.shape[1], S.shape[3])


def _check_arrays(
    op: str, mixed_qkv: Any, b: Any, a: Any, conv_state: Any, recurrent_state: Any
) -> tuple[int, int]:
    """Check these arrays and return HK and K."""
    check_array(op, "mixed_qkv", mixed_qkv, [("T", None), ("C", None)], FLOATS)
    T, C = mixed_qkv.shape
    dims = [(name, None) for name in ("N", "HV", "K", "V")]
    check_array(op, "recurrent_state", recurrent_state, dims, [jnp.float32])
    N, HV, K, V = recurrent_state.shape
    if 0 in (T, *recurrent_state.shape):
        found = f"mixed_qkv has shape {mixed_qkv.shape}, recurrent_state {recurrent_state.shape}"
        raise ShapeError(f"{op}: {found}; needed no empty axis, T >= 1")
    HK, rest = divmod(C - HV * V, 2 * K)
    if rest or HK < 1 or HV % HK:
        found = f"mixed_qkv has C = {C}, recurrent_state [HV={HV}, K={K}, V={V}]"
        raise ShapeError(f"{op}: {found}; needed C = 2*HK*K + HV*V with HK a divisor of HV")
    for name, x in (("b", b), ("a", a)):
        check_array(op, name, x, [("T", T), ("HV", HV)], FLOATS)
    dtypes = dict.fromkeys((jnp.dtype(jnp.float32), jnp.dtype(mixed_qkv.dtype)))
    dims = [("N", N), ("W-1", None), ("C", C)]
    check_array(op, "conv_state", conv_state, dims, tuple(dtypes))
    return HK, K


def _check_weights(
    op: str,
    C: int,
    conv_state: Any,
    recurrent_state: Any,
    conv_weight: Any,
    A_log: Any,
    dt_bias: Any,
) -> None:
    W, HV = conv_state.shape[1] + 1, recurrent_state.shape[1]
    check_array(op, "conv_weight", conv_weight, [("C", C), ("W", W)], [jnp.float32])
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_array(op, name, x, [("HV", HV)], [jnp.float32])


def _check_rows(
    op: str,
    query_start_loc: Any,
    state_indices: Any,
    has_initial_state: Any,
    mixed_qkv: Any,
    conv_state: Any,
) -> None:
    check_array(op, "state_indices", state_indices, [("R", None)], [jnp.int32])
    R = len(state_indices)
    if R == 0:
        raise ShapeError(f"{op}: state_indices has shape (0,); needed at least one row")
    check_array(op, "query_start_loc", query_start_loc, [("R+1", R + 1)], [jnp.int32])
    check_array(op, "has_initial_state", has_initial_state, [("R", R)], [jnp.bool_])
    if not isinstance(query_start_loc, Tracer):
        at, T = np.asarray(query_start_loc), len(mixed_qkv)
        if at[0] != 0 or at[-1] > T or (np.diff(at) < 0).any():
            needed = f"needed to begin at 0, never go down, end by {T}"
            raise ShapeError(f"{op}: query_start_loc is {at}; {needed}")
    if not isinstance(state_indices, Tracer):
        slots, N = np.asarray(state_indices), len(conv_state)
        named = slots[slots != -1]
        if ((slots < -1) | (slots >= N)).any() or len(np.unique(named)) < len(named):
            needed = f"needed -1 to {N - 1}, no slot twice"
            raise SlotError(f"{op}: state_indices is {slots}; {needed}")


def _check_lengths(op: str, query_start_loc: Any, most: int) -> None:
    if type(most) is not int or most < 1:
        raise ShapeError(f"{op}: max_query_len is {most!r}; needed a positive integer")
    if not isinstance(query_start_loc, Tracer):
        longest = int(np.diff(np.asarray(query_start_loc)).max())
        if longest > most:
            raise ShapeError(f"{op}: a row has {longest} tokens; max_query_len is {most}")
