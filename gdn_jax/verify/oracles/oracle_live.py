"""The live oracle: a ``transformers`` layer run on the spot, in a process of its own."""

import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from gdn_jax._core.checks import FLOATS, check_array, check_config, check_finite
from gdn_jax.config import GDNConfig
from gdn_jax.errors import OracleError, ShapeError
from gdn_jax.layer.params import param_dims
from gdn_jax.layer.trace import trace_shapes
from gdn_jax.report.metrics import distance
from gdn_jax.verify import draw
from gdn_jax.verify.oracles import transformers_forward
from gdn_jax.verify.oracles.transformers_forward import ONE_SHOT

_FINAL = ("S", "HIST")


@dataclasses.dataclass(frozen=True)
class Oracle:
    """What a ``transformers`` layer makes of ``xs``, and where that comes from.

    Attributes:
        cfg: the layer's sizes.
        architecture: ``"qwen3_5"`` or ``"qwen3_next"``.
        seed: the seed of weights and inputs, or None when they were not drawn.
        xs: inputs [T, D].
        trace: the cached path, token by token: [T, ..] under the names of
            :class:`gdn_jax.Trace`, but S [HV, K, V] and HIST [W-1, C] after the last token only.
        one_shot: one call over all tokens: OUT [T, D]; S and HIST too when computed on the spot.
        provenance: versions, date, draw scheme, and the max_rel of the one-shot OUT and S to
            those of the cached path.
        weights_sha256: :func:`gdn_jax.verify.draw.weights_sha256` of the weights.
    """

    cfg: GDNConfig
    architecture: str
    seed: int | None
    xs: np.ndarray
    trace: dict[str, np.ndarray]
    one_shot: dict[str, np.ndarray]
    provenance: dict[str, str]
    weights_sha256: str


def compute_oracle(
    weights: Mapping[str, Any],
    cfg: GDNConfig,
    xs: Any,
    architecture: str,
    *,
    seed: int | None = None,
    python: str | os.PathLike[str] | None = None,
) -> Oracle:
    """Run the ``transformers`` layer in float32 on the CPU, in a process of its own.

    Args:
        weights: the fields of GDNParams by name, float32, bfloat16 or float16.
        cfg: the layer's sizes.
        xs: float32 inputs [T, D] of one sequence that starts from zeros.
        architecture: ``"qwen3_5"`` or ``"qwen3_next"``; the weights are the same, the latter's
            module holds them fused.
        seed: what weights and inputs were drawn from, for the record.
        python: an interpreter that has torch and transformers; this one by default.

    Raises:
        ShapeError: weights or inputs do not fit ``cfg``.
        OracleError: an unknown architecture, torch or transformers missing, the run failed, or
            its results are not finite.
    """
    where = "transformers oracle"
    check_config(where, cfg)
    if architecture not in transformers_forward.ARCHITECTURES:
        known = " or ".join(transformers_forward.ARCHITECTURES)
        raise OracleError(f"{where}: architecture is {architecture!r}; needed {known}")
    for name, dims in param_dims(cfg).items():
        check_array(where, name, weights.get(name), dims, FLOATS)
    check_array(where, "xs", xs, [("T", None), ("D", cfg.d_model)], [jnp.float32])
    if not len(xs):
        raise ShapeError(f"{where}: xs has 0 tokens; needed at least 1")
    host = {name: np.ascontiguousarray(weights[name], np.float32) for name in param_dims(cfg)}
    xs = np.array(xs, np.float32, order="C")

    request = {"architecture": architecture, "config": json.dumps(dataclasses.asdict(cfg))}
    script = transformers_forward.__file__
    entries, versions = run_script(
        where, interpreter(where, python), host | {"xs": xs}, request, script
    )
    live = {ONE_SHOT + name: trace_shapes(cfg)[name] for name in _FINAL}
    check_tensors(where, entries | {"xs": xs}, oracle_shapes(cfg, len(xs)) | live)
    trace = {name: entries[name] for name in trace_shapes(cfg)}
    one_shot = {name: entries[ONE_SHOT + name] for name in ("OUT", *_FINAL)}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    provenance = versions | {"numpy": np.__version__, "date": now}
    if seed is not None:
        provenance["draw"] = draw.SCHEME
    for name in ("OUT", "S"):
        apart = distance(one_shot[name], trace[name]).max_rel
        provenance[f"one_shot_{name}_max_rel"] = f"{apart:.3e}"
    sha256 = draw.weights_sha256(host)
    return Oracle(cfg, architecture, seed, xs, trace, one_shot, provenance, sha256)


def interpreter(where: str, python: str | os.PathLike[str] | None) -> str:
    """The interpreter to use: this one when None, if it has torch and transformers.

    Raises:
        OracleError: it lacks them, or there is no such interpreter.
    """
    if python is None:
        lacking = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
        if lacking:
            raise OracleError(
                f"{where}: no {' and no '.join(lacking)} here; install gdn-jax[oracle], or name "
                "an interpreter that has both (python=)"
            )
        return sys.executable
    if shutil.which(python) is None:
        raise OracleError(f"{where}: no interpreter {python}; needed one with torch, transformers")
    return os.fspath(python)


def run_script(
    where: str,
    python: str,
    tensors: dict[str, np.ndarray],
    metadata: dict[str, str],
    script: str,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata of the answer of a script that stands alone.

    It is copied, so that its neighbours hide no module from it.

    Raises:
        OracleError: the script failed, with its last line.
    """
    with tempfile.TemporaryDirectory(prefix="gdn-jax-oracle-") as folder:
        request, result = Path(folder, "request.safetensors"), Path(folder, "result.safetensors")
        save_file(tensors, request, metadata)
        command = [python, shutil.copy(script, folder), request, result]
        try:
            run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise OracleError(f"{where}: {python} cannot be run ({error.strerror})") from None
        if run.returncode or not result.is_file():
            said = run.stderr.strip().splitlines() or [f"exit status {run.returncode}, no result"]
            raise OracleError(f"{where}: {python} failed: {said[-1]}")
        with safe_open(result, framework="numpy") as file:
            return {n: file.get_tensor(n) for n in file.keys()}, file.metadata()  # noqa: SIM118


def oracle_shapes(cfg: GDNConfig, tokens: int) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of an oracle file."""
    shapes = {
        name: shape if name in _FINAL else (tokens, *shape)
        for name, shape in trace_shapes(cfg).items()
    }
    return shapes | {"xs": (tokens, cfg.d_model), f"{ONE_SHOT}OUT": (tokens, cfg.d_model)}


def check_tensors(
    where: str, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise OracleError unless these are the tensors, float32, of these shapes, and finite."""
    for what, names in (("no", shapes.keys() - tensors), ("unknown", tensors.keys() - shapes)):
        if names:
            needed = ", ".join(sorted(shapes))
            raise OracleError(f"{where}: {what} tensor {', '.join(sorted(names))}; needed {needed}")
    for name, shape in shapes.items():
        x = tensors[name]
        if x.shape != shape or x.dtype != np.float32 or not x.size:
            needed = f"{list(shape)} float32, at least one token"
            raise OracleError(f"{where}: {name} is {list(x.shape)} {x.dtype}; needed {needed}")
        check_finite(where, name, x, OracleError)
