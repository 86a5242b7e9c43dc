"""A layer's prefill and the chunked rule as verify runs them, and the table rows of the results."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import oracle
from gdn_jax.config import GDNConfig
from gdn_jax.layer.compose import decode, prefill
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState, init_state
from gdn_jax.ops.chunk import chunk_gated_delta_rule
from gdn_jax.report.metrics import distance, unequal
from gdn_jax.report.record import Row
from gdn_jax.verify.draw import draw_inputs
from gdn_jax.verify.layer.device_run import device_params
from gdn_jax.verify.layer.rows import Traces
from gdn_jax.verify.oracles.oracle_live import Oracle

TOKENS = 70
"""Of the layer: more than a chunk, and few enough for float64 at the 27B shape."""
LIMIT = 1e-5
"""A layer of the 27B shape measures 1.7e-6 to float64 and to transformers, the operator 5e-7."""
NARROW_LIMIT = 2e-2
"""A few roundings to bfloat16, of 2**-9 each."""
PARTS = ("out", "S", "history")
"""Of a row: distances of outputs, of the state after them, and of the convolution's history."""
Found = tuple[list[Row], str]
"""A check's rows, and what they are of."""
Pass = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Outputs [T, D], S [HV, K, V] and the history [W-1, C] of one sequence, on the host."""

_prefill = jax.jit(prefill, static_argnames=("cfg", "backend"))
_decode = jax.jit(decode, static_argnames=("cfg", "backend"))
_rule = jax.jit(chunk_gated_delta_rule, static_argnames=("use_qk_l2norm", "chunk_size", "backend"))


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """A layer by its ``weights``, drawn inputs ``xs`` [TOKENS, D], and the backend to run on."""

    cfg: GDNConfig
    weights: Mapping[str, np.ndarray]
    oracle: Oracle | None
    params: GDNParams
    xs: np.ndarray
    backend: str | None

    @classmethod
    def of(
        cls,
        cfg: GDNConfig,
        weights: Mapping[str, np.ndarray],
        backend: str | None,
        oracle: Oracle | None = None,
    ) -> "LayerRun":
        """These weights on the device."""
        return cls(
            cfg, weights, oracle, device_params(weights), draw_inputs(cfg, TOKENS, 0), backend
        )

    @functools.cached_property
    def exact(self) -> Traces:
        """Every operator of every token of ``xs`` in float64."""
        return oracle.layer_trace(self.weights, self.cfg, self.xs)

    def prefill(
        self, xs: np.ndarray, state: GDNState | None = None, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, GDNState]:
        """xs [B, T, D] from a state, zeros by default."""
        return self._run(_prefill, xs, state, lengths=lengths)

    def decode(
        self, xs: np.ndarray, state: GDNState | None = None
    ) -> tuple[np.ndarray, GDNState, dict[int, GDNState]]:
        """Token by token: the outputs, the last state, and the state after any number of tokens."""
        after, ys = {}, []
        for t in range(xs.shape[1]):
            y, state = self._run(_decode, xs[:, t : t + 1], state)
            ys.append(y)
            after[t + 1] = state
        return np.concatenate(ys, axis=1), after[xs.shape[1]], after

    def _run(
        self, program: Any, xs: np.ndarray, state: GDNState | None, **options: Any
    ) -> tuple[np.ndarray, GDNState]:
        start = init_state(self.cfg, len(xs)) if state is None else state
        ys, after = program(
            self.params, start, jnp.asarray(xs), self.cfg, backend=self.backend, **options
        )
        return np.asarray(ys), after


def one(ys: np.ndarray, state: GDNState, b: int = 0) -> Pass:
    """A row of a batch."""
    return ys[b], np.asarray(state.S[b]), np.asarray(state.conv_hist[b])


def far(found: np.ndarray, wanted: np.ndarray) -> float:
    """max_rel."""
    return distance(found, wanted).max_rel


def same(found: np.ndarray, wanted: np.ndarray) -> float:
    """0 when no bit differs, else infinitely far."""
    return np.inf if unequal(found, wanted) else 0.0


def row(
    case: str,
    out: float | None = None,
    S: float | None = None,
    history: float | None = None,
    *,
    limit: float = LIMIT,
) -> Row:
    """A row of the table: the case, the distances that it has, and whether all are in the limit."""
    values = {"out": out, "S": S, "history": history}
    ok = all(value <= limit for value in values.values() if value is not None)
    return {"case": case, **values, "limit": limit, "ok": ok}


def pass_row(case: str, found: Pass, wanted: Pass) -> Row:
    """All three parts of a pass to those of another."""
    return row(case, *(far(x, y) for x, y in zip(found, wanted, strict=True)))


def verdict(rows: list[Row]) -> tuple[float, str]:
    """The worst value of all rows, and where it is."""
    found = [(r[part], f"{part} of {r['case']}") for r in rows for part in PARTS]
    return max((value, where) for value, where in found if value is not None)
