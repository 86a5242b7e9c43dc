"""flash-linear-attention's delta rule of one token, on our own rows' operands."""

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from gdn_jax.bench.peers.peer import FLA, ask
from gdn_jax.bench.slope import REPETITIONS, Timing
from gdn_jax.bench.suites.delta_rule import LAYERS, draw, error, sizes
from gdn_jax.bench.workload import Prepared, Workload
from gdn_jax.config import GDNConfig

_TIMEOUT = 300


def workloads(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """``fused_recurrent_gated_delta_rule``: a CUDA graph over the states of 48 layers."""
    for batch in batches if backends else ():
        shape, moved, flops = sizes(cfg, batch)
        make = functools.partial(_make, cfg, tuple(batches), batch)
        yield Workload("delta", FLA.name, shape, batch, moved, flops, LAYERS, make)


def _make(cfg: GDNConfig, batches: tuple[int, ...], batch: int) -> Prepared:
    FLA.require()
    found = _answers(cfg, batches)
    o, S, seconds = (found[f"{name}{batch}"] for name in ("o", "S", "seconds"))
    timing = Timing.of([float(s) for s in seconds])
    return Prepared(
        lambda: error(draw(cfg, batch), o, S),
        lambda c: c,
        None,
        f"{FLA.title}, to float64",
        lambda _: timing,
    )


@functools.lru_cache(maxsize=1)
def _answers(cfg: GDNConfig, batches: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Outputs, states and times of every batch."""
    names = ("q", "k", "v", "g", "beta", "S")
    inputs = {
        f"{name}{batch}": x
        for batch in batches
        for name, x in zip(names, draw(cfg, batch), strict=True)
    }
    inputs |= {"batches": np.array(batches), "plan": np.array([LAYERS, REPETITIONS])}
    return ask("fla_recurrent", inputs, _TIMEOUT)
