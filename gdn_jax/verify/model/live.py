"""A checkpoint against an installed transformers, layer by layer, in a process of its own."""

import os
from pathlib import Path

import numpy as np

from gdn_jax.errors import OracleError
from gdn_jax.models.model import load
from gdn_jax.report.metrics import distance
from gdn_jax.report.progress import Stage
from gdn_jax.report.record import Report
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.model.checks import PROMPT
from gdn_jax.verify.model.run import ModelRun, verdict
from gdn_jax.verify.oracles import transformers_model
from gdn_jax.verify.oracles.oracle_live import interpreter, run_script

STAGES = 3
CHAIN_LIMIT = 1e-3
"""Of the logits: each layer amplifies what the ones before it left, how much is the model's own."""


def run(
    folder: str,
    report: Report,
    *,
    backend: str | None,
    stage: Stage,
    python: str | os.PathLike[str] | None = None,
) -> str:
    """Compare float32 weights of a directory with transformers on drawn tokens.

    Every layer runs on what transformers gives to its own, so that an error stays in its layer; the
    whole model runs too. The report gets a row of each layer, ``model.layers`` and
    ``model.logits``. Returns the backend.

    Raises:
        OracleError: no torch or transformers, or they cannot run this checkpoint.
        CheckpointError, ConfigError, DeviceMemoryError: it cannot be loaded.
    """
    where = f"{folder}: transformers oracle"
    python = interpreter(where, python)
    with stage("weights"):
        model = load(folder, weights="f32", backend=backend)
    cfg = model.cfg
    ids = drawn(cfg.vocab_size)
    with stage("transformers"):
        request = {"directory": str(Path(folder).absolute())}
        known, versions = run_script(
            where, python, {"ids": ids}, request, transformers_model.__file__
        )
        L, T, D = len(cfg.layer_types), len(ids), cfg.hidden_size
        shapes = {"hidden": (L + 1, T, D), "logits": (T, cfg.vocab_size)}
        for name, shape in shapes.items():
            if name not in known or known[name].shape != shape:
                found = known[name].shape if name in known else "missing"
                raise OracleError(f"{where}: {name} is {found}; needed {shape}")
    report.settings["transformers"] = ", ".join(f"{n} {v}" for n, v in sorted(versions.items()))
    this = ModelRun(model, known)
    with stage("model"):
        rows = report.tables["model"] = this.layers(ids)
        apart = distance(this.walk(ids, []), known["logits"]).max_rel
    report.checks.append(check("model.layers", *verdict(rows)))
    detail = f"{PROMPT} tokens through the whole model"
    report.checks.append(check("model.logits", apart, CHAIN_LIMIT, detail))
    return model.backend


def drawn(vocab: int) -> np.ndarray:
    """Token ids [PROMPT], the same ones each time."""
    return np.random.default_rng(0).integers(0, vocab, PROMPT).astype(np.int32)
