"""The delta rule of flash-linear-attention on the same inputs, in a process of its own."""

import functools
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gdn_jax.bench.slope import REPETITIONS, Timing
from gdn_jax.bench.suites.delta import LAYERS, draw, error, sizes
from gdn_jax.bench.workload import Prepared, Workload
from gdn_jax.config import GDNConfig
from gdn_jax.errors import BackendUnavailableError

_TIMEOUT = 300


def workloads(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """``fused_recurrent_gated_delta_rule``: a CUDA graph over the states of 48 layers."""
    for batch in batches if backends else ():
        shape, moved, flops = sizes(cfg, batch)
        make = functools.partial(_make, cfg, tuple(batches), batch)
        yield Workload("delta", "fla", shape, batch, moved, flops, LAYERS, make)


def _make(cfg: GDNConfig, batches: tuple[int, ...], batch: int) -> Prepared:
    lacking = [name for name in ("torch", "fla") if importlib.util.find_spec(name) is None]
    if lacking:
        raise BackendUnavailableError(f"no {' and no '.join(lacking)} here")
    found = _child(cfg, batches)
    o, S, seconds = (found[f"{name}{batch}"] for name in ("o", "S", "seconds"))
    timing = Timing.of([float(s) for s in seconds])
    version = str(found["version"])
    detail = f"flash-linear-attention {version}, to float64"
    return Prepared(
        lambda: error(draw(cfg, batch), o, S), lambda c: c, None, detail, lambda _: timing
    )


@functools.lru_cache(maxsize=1)
def _child(cfg: GDNConfig, batches: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Outputs, states and times of every batch."""
    names = ("q", "k", "v", "g", "beta", "S")
    inputs = {
        f"{name}{batch}": x
        for batch in batches
        for name, x in zip(names, draw(cfg, batch), strict=True)
    }
    inputs |= {"batches": np.array(batches), "plan": np.array([LAYERS, REPETITIONS])}
    return asked("gdn_jax.bench.peers.fla_recurrent", inputs)


def asked(
    module: str, inputs: dict[str, np.ndarray], timeout: float = _TIMEOUT
) -> dict[str, np.ndarray]:
    """What ``python -m module REQUEST RESULT`` makes of these arrays.

    Raises:
        BackendUnavailableError: it fails, with its last line, or takes longer than ``timeout`` s.
    """
    with tempfile.TemporaryDirectory(prefix="gdn-jax-peer-") as folder:
        request, result = Path(folder, "request.npz"), Path(folder, "result.npz")
        np.savez(request, allow_pickle=False, **inputs)
        command = [sys.executable, "-m", module, str(request), str(result)]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise BackendUnavailableError(f"took longer than {timeout} s") from None
        if run.returncode or not result.is_file():
            said = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
            raise BackendUnavailableError(said[-1])
        with np.load(result) as file:
            return dict(file)
