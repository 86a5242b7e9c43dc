"""Draft tokens that can be revoked: run them beside the state, commit what was accepted.

A draft is a tree: token t continues the state after its parent, an earlier token or the state
itself (-1). A chain is the tree in which every parent is the token before. Nothing is written
until :func:`committed` computes the state after one of its nodes, by either scheme:

- ``"snapshot"`` keeps S after every token: ``4·Td·HV·K·V`` bytes a row and layer, and a commit
  copies one of them.
- ``"replay"`` keeps q, k, v, g and beta of every token: ``4·Td·(2·HK·K + HV·V + 2·HV)`` bytes, and
  a commit runs the delta rule again over the accepted tokens.

Both also keep the convolution's inputs, ``4·Td·C`` bytes. For the 27B layer a snapshot takes 3.1 MB
a token and replay 41 KB, 77 times less; but its commit reads and writes S once a token.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from gdn_jax._core.checks import check_array
from gdn_jax._core.varying import varying_like
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError, UnknownNameError
from gdn_jax.layer import steps
from gdn_jax.layer.compose import Step, check_lengths
from gdn_jax.layer.pallas import delta_rule_as_stepped
from gdn_jax.layer.state import GDNState
from gdn_jax.types import Array

SCHEMES = ("snapshot", "replay")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What a draft of Td tokens for B rows runs, and what it keeps.

    ``lengths`` int32 [B], ``parents`` int32 [B, Td]; ``chain`` says that every parent is the
    token before, so that no state but the last is needed again; ``scheme`` one of :data:`SCHEMES`.
    """

    lengths: Array
    parents: Array
    chain: bool = dataclasses.field(metadata={"static": True})
    scheme: str = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftRecord:
    """What one layer keeps of a draft of Td tokens for B rows; a pytree.

    ``S`` [Td, B, HV, K, V] or ``operands`` q, k [Td, B, HK, K], v [Td, B, HV, V], g, beta
    [Td, B, HV] by the scheme, the other is None; ``frames`` [Td, B, C] are the convolution's
    inputs, ``parents`` int32 [B, Td], ``lengths`` int32 [B]. ``backend`` ran the draft, and a
    commit by replay runs the delta rule on it.
    """

    S: Array | None
    operands: tuple[Array, ...] | None
    frames: Array
    parents: Array
    lengths: Array
    backend: str = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in jax.tree.leaves(self))


def planned(where: str, B: int, Td: int, lengths: Any, parents: Any, scheme: str) -> Plan:
    """The plan of a draft, after checks; values are checked unless traced.

    None as ``lengths`` means every token, None as ``parents`` a chain.

    Raises:
        UnknownNameError: no such scheme.
        ShapeError: a wrong shape or dtype, a length outside 0 to Td, or a parent that is not an
            earlier token.
    """
    if scheme not in SCHEMES:
        raise UnknownNameError(f"{where}: no scheme {scheme!r}; there are {', '.join(SCHEMES)}")
    chain = parents is None
    lengths = jnp.full(B, Td, jnp.int32) if lengths is None else lengths
    parents = np.broadcast_to(np.arange(-1, Td - 1, dtype=np.int32), (B, Td)) if chain else parents
    check_lengths(where, lengths, B, Td)
    check_array(where, "parents", parents, [("B", B), ("Td", Td)], [jnp.int32])
    if not isinstance(parents, Tracer) and not within(parents, -1, np.arange(Td) - 1):
        raise ShapeError(f"{where}: a parent is no earlier token; needed -1 <= parents[:, t] < t")
    return Plan(jnp.asarray(lengths), jnp.asarray(parents), chain, scheme)


def within(x: Any, low: Any, high: Any) -> bool:
    """Whether every number is in its range."""
    x = np.asarray(x)
    return bool(((x >= low) & (x <= high)).all())


def draft(
    step: Step, state: GDNState, xs: Array, plan: Plan, cfg: GDNConfig, backend: str
) -> tuple[Array, DraftRecord]:
    """Run a draft xs [B, Td, D] from the rows of ``state``, which is not changed.

    Tokens at or beyond a row's length give zeros.

    Args:
        step: one token of the layer with every operator's result, on ``backend``.
        state: S [B, HV, K, V], conv_hist [B, W-1, C].
        xs: inputs, in an order in which parents come first.
        plan: of :func:`planned`.
        cfg: the layer's sizes.
        backend: that of ``step``.

    Returns:
        ys [B, Td, D] and the record.
    """
    Td = xs.shape[1]
    # A tree keeps the state before the first token and after every one, [Td + 1, B, ..].
    nodes = jax.tree.map(lambda x: jnp.broadcast_to(x, (Td + 1, *x.shape)), state)

    def token(carry: Any, operands: tuple[Array, Array, Array]) -> tuple[Any, Any]:
        x, parent, t = operands
        before = carry if plan.chain else jax.tree.map(lambda x: _at_node(x, parent + 1), carry)
        y, after, trace = step(before, x)
        _, _, v = steps.split_heads(trace["XCV"], cfg)
        used = (trace["Q"], trace["K"], v, trace["G"], trace["BETA"])
        if not plan.chain:
            carry = jax.tree.map(lambda x, new: x.at[t + 1].set(new), carry, after)
        kept = (after.S, None) if plan.scheme == "snapshot" else (None, used)
        y = jnp.where((t < plan.lengths)[:, None], y, 0)
        return after if plan.chain else carry, (y, *kept, trace["XC"])

    tokens = (jnp.swapaxes(xs, 0, 1), jnp.swapaxes(plan.parents, 0, 1), jnp.arange(Td))
    with jax.named_scope("draft"):
        _, (ys, S, used, frames) = lax.scan(token, state if plan.chain else nodes, tokens)
    record = DraftRecord(S, used, frames, plan.parents, plan.lengths, backend)
    return jnp.swapaxes(ys, 0, 1), record


def committed(record: DraftRecord, state: GDNState, accepted: Array) -> GDNState:
    """The rows of ``state`` after their accepted node: n means node n - 1, 0 the state itself.

    Equal to decoding the tokens on the path to the node one after another, bit for bit on one
    backend. A number beyond a row's length is taken as the length.

    Args:
        record: of a draft from ``state``.
        state: S [B, HV, K, V], conv_hist [B, W-1, C].
        accepted: int32 [B].
    """
    node = jnp.minimum(accepted, record.lengths) - 1
    S = _replayed(record, state.S, node) if record.S is None else _kept(record.S, state.S, node)
    return GDNState(S, _history(record, state.conv_hist, node))


def _kept(S: Array, start: Array, node: Array) -> Array:
    return jnp.where((node < 0)[:, None, None, None], start, _at_node(S, jnp.maximum(node, 0)))


def _replayed(record: DraftRecord, start: Array, node: Array) -> Array:
    assert record.operands is not None
    path = on_path(record.parents, node)
    rule = delta_rule_as_stepped if record.backend == "pallas" else steps.delta_rule

    def token(S: Array, operands: Any) -> tuple[Array, None]:
        # A barrier as in the draft: fused into the rule, the operands would change bits.
        taken, (q, k, v, g, beta) = lax.optimization_barrier(operands)
        _, new = rule(q, k, v, g, beta, S)
        return jnp.where(taken[:, None, None, None], new, S), None

    operands = (path.T, record.operands)
    return lax.scan(token, varying_like(start, operands), operands)[0]


def on_path(parents: Array, node: Array) -> Array:
    """Whether token t is on the path from the state to a row's node, bool [B, Td]."""
    tokens = jnp.arange(parents.shape[1])

    def up(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        at, path = carry
        return _parent(parents, at), path | (tokens[None] == at[:, None])

    start = jnp.zeros(parents.shape, bool)
    start = varying_like((node, start), parents)
    return lax.fori_loop(0, parents.shape[1], up, start)[1]


def _history(record: DraftRecord, hist: Array, node: Array) -> Array:
    """The last W-1 inputs on the path: those of the draft, after the end of the old history."""
    at, past, frames = node, jnp.full_like(node, hist.shape[1] - 1), []
    for _ in range(hist.shape[1]):
        drafted = (at >= 0)[:, None]
        old = jnp.take_along_axis(hist, past[:, None, None], axis=1)[:, 0]
        frames.append(jnp.where(drafted, _at_node(record.frames, jnp.maximum(at, 0)), old))
        past = jnp.where(at >= 0, past, past - 1)
        at = _parent(record.parents, at)
    return jnp.stack(frames[::-1], axis=1)


def _parent(parents: Array, at: Array) -> Array:
    up = jnp.take_along_axis(parents, jnp.maximum(at, 0)[:, None], axis=1)[:, 0]
    return jnp.where(at >= 0, up, -1)


@functools.partial(jax.vmap, in_axes=(1, 0))
def _at_node(x: Array, node: Array) -> Array:
    """Row b of x [nodes, B, ..] at its own node."""
    return x[node]
