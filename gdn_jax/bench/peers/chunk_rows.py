"""The chunked delta rule of two other projects on our rows' operands, where they are installed."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.bench.peers.peer import FLA, JLA, Peer, ask
from gdn_jax.bench.slope import REPETITIONS, Timing
from gdn_jax.bench.suites import chunk
from gdn_jax.bench.suites.chunk import Case
from gdn_jax.bench.workload import Prepared, Workload
from gdn_jax.config import GDNConfig
from gdn_jax.errors import BackendUnavailableError
from gdn_jax.report.metrics import distance

ENDS = 512
"""How many tokens, at either end, the other process returns the outputs of."""
_TIMEOUT = 120
_JLA = "jla.ops.mosaic_gpu.gated_delta_rule"


def workloads(cfg: GDNConfig, tokens: Sequence[int]) -> Iterator[Workload]:
    """Rows of jax-linear-attention, in this process, and flash-linear-attention, in its own."""
    for T in tokens:
        yield _row(Case(cfg, T), JLA, functools.partial(_make_jla, Case(cfg, T)))
    for T in tokens:
        yield _row(Case(cfg, T), FLA, functools.partial(_make_fla, Case(cfg, T), tuple(tokens)))


def _row(case: Case, peer: Peer, make: Callable[[], Prepared]) -> Workload:
    return chunk.row_of(case, "chunk", peer.name, make)


def _make_jla(case: Case) -> Prepared:
    """Prepare jax-linear-attention; q and k are repeated for every value head before timing."""
    JLA.require()
    try:
        operator: Any = importlib.import_module(_JLA).gated_delta_rule

        def rule(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            *tokens, S = operands
            return operator(*tokens, initial_state=S, output_final_state=True)

        return chunk.prepare(case, rule, f"{JLA.title}, ", case.cfg.heads_per_key)
    except Exception as error:  # another project's fault is no check of this one
        raise JLA.fault(error) from error


def _make_fla(case: Case, tokens: tuple[int, ...]) -> Prepared:
    FLA.require()
    found = _answers(case.cfg, tokens)
    T = case.tokens
    failed = found.get("failed", found.get(f"failed{T}"))
    if failed is not None:
        raise FLA.fault(str(failed))
    o, S, seconds, held = (found[f"{name}{T}"] for name in ("o", "S", "seconds", "held"))
    detail = f"{FLA.title} {found[f'how{T}']}, to float64 on the device, {ENDS} tokens at either "
    detail += "end and the state"
    timing = Timing.of([float(s) for s in seconds])

    def check() -> float:
        exact_o, exact_S = chunk.exact(case)
        ends = exact_o[0, jnp.asarray(_ends(T))]
        worst = float(chunk.worst_block(jnp.asarray(o), ends))
        return float(np.max([worst, distance(S, np.asarray(exact_S)).max_rel]))

    return Prepared(check, lambda c: c, None, detail, lambda _: timing, int(held))


def _ends(T: int) -> np.ndarray:
    """The indices of the first and the last tokens."""
    return np.unique(np.concatenate([np.arange(min(ENDS, T)), np.arange(max(0, T - ENDS), T)]))


@functools.lru_cache(maxsize=1)
def _answers(cfg: GDNConfig, tokens: tuple[int, ...]) -> dict[str, Any]:
    """Outputs, states and times of every length, or why there are none; the process runs once.

    q, k and v are sent as the bits of one drawn period in bfloat16; the other process repeats it.
    """
    names = ("q", "k", "v")
    rows = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in chunk.drawn(cfg))
    request = {name: x.view(np.int16) for name, x in zip(names, rows, strict=True)}
    request["g"], request["beta"] = chunk.gates(cfg, max(tokens))
    request["S"] = chunk.states(cfg, 1)
    request |= {"tokens": np.array(tokens), "repetitions": np.array(REPETITIONS)}
    request |= {f"ends{T}": _ends(T) for T in tokens}
    try:
        return ask("fla_chunk", request, _TIMEOUT)
    except BackendUnavailableError as error:
        return {"failed": str(error)}
