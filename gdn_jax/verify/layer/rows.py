"""Table rows shared by every tier: tokens, operators, state sizes, decay."""

import dataclasses

import numpy as np

from gdn_jax.layer.state import GDNState
from gdn_jax.report.metrics import distance, worst_head
from gdn_jax.report.record import Row

Traces = dict[str, np.ndarray]
"""Arrays [T, ..] by read-back name."""

HEADED = ("Q", "K", "ON", "ONN", "S")
"""Operators whose first axis is heads."""

FINAL_ONLY = ("S", "HIST")
"""What transformers gives after the last token alone."""


def state_rows(state: GDNState) -> list[Row]:
    """Sizes of a stack's state, from the arrays themselves."""
    layers = state.S.shape[0]
    parts = [("S, one layer", state.S[0]), ("history, one layer", state.conv_hist[0])]
    parts += [(f"S, {layers} layers", state.S), (f"history, {layers} layers", state.conv_hist)]
    rows: list[Row] = [
        {"part": part, "shape": str(list(x.shape)), "bytes": x.nbytes} for part, x in parts
    ]
    return [*rows, {"part": f"together, {layers} layers", "shape": "", "bytes": state.nbytes}]


def token_rows(pair: str, out: np.ndarray, ref: np.ndarray, limit: float | None) -> list[Row]:
    """Distance of OUT token by token; ``limit`` gives each a verdict."""
    rows: list[Row] = []
    for token, (o, r) in enumerate(zip(out, ref, strict=True)):
        d = distance(o, r)
        row: Row = {"pair": pair, "token": token, **dataclasses.asdict(d), "max_rel": d.max_rel}
        rows.append(row | {"limit": limit, "ok": None if limit is None else d.max_rel <= limit})
    return rows


def operator_rows(pair: str, out: Traces, ref: Traces, tokens: int) -> list[Row]:
    """Own-normalised distance of every operator that both sides have, for every token.

    Either side may be a transformers trace, which holds S and HIST of its last token alone: they
    are compared where the other side has that token.
    """
    rows: list[Row] = []
    for name in ref:
        if name not in out:
            continue
        for token in range(tokens):
            o, r = (_at(side, name, token) for side in (out, ref))
            if o is None or r is None:
                continue
            d = distance(o, r)
            row: Row = {"operator": name, "pair": pair, "token": token, "max_rel": d.max_rel}
            head, value = worst_head(o, r) if name in HEADED else (None, None)
            rows.append(row | {"rms_rel": d.rms_rel, "worst_head": head, "worst_head_rel": value})
    return rows


def _at(traces: Traces, name: str, token: int) -> np.ndarray | None:
    whole, tokens = traces[name], len(traces["OUT"])
    if name in FINAL_ONLY and whole.ndim == (3 if name == "S" else 2):
        return whole if token == tokens - 1 else None
    return whole[token]


def operator_verdict(rows: list[Row], metric: str, limit: float) -> tuple[float, str]:
    """The worst value of ``max_rel`` or ``worst_head_rel`` over operators and tokens, and where.

    When the limit is broken, the operator and token where it is broken first come first.
    """
    rows = [row for row in rows if row[metric] is not None]
    worst = max(rows, key=lambda row: row[metric])
    head = f", head {worst['worst_head']}" if metric == "worst_head_rel" else ""
    detail = f"worst at {worst['operator']}, token {worst['token']}{head}"
    first = min((r for r in rows if r[metric] > limit), key=lambda r: r["token"], default=None)
    if first is not None:
        detail = f"starts at {first['operator']}, token {first['token']}; {detail}"
    return worst[metric], detail


def drift_rows(out: Traces, ref: Traces) -> list[Row]:
    """Distance of OUT and of S after each token of a long run."""
    rows: list[Row] = []
    for token in range(len(out["OUT"])):
        y, S = (distance(out[name][token], ref[name][token]) for name in ("OUT", "S"))
        rows.append(
            {"token": token, "max_rel": y.max_rel, "rms_rel": y.rms_rel, "S_rms_rel": S.rms_rel}
        )
    return rows


def decay_rows(exact: Traces) -> list[Row]:
    """Per head and token: the decay, what is left of the first token's writing, and ‖S‖."""
    decay = np.exp(exact["G"])
    kept = np.exp(np.cumsum(exact["G"], axis=0) - exact["G"][0])
    norms = np.linalg.norm(exact["S"], axis=(2, 3))
    return [
        {"head": h, "token": t, "decay": decay[t, h], "kept": kept[t, h], "S_norm": norms[t, h]}
        for h in range(decay.shape[1])
        for t in range(len(decay))
    ]
