"""What a run verifies: the weights, the inputs, and the transformers oracle beside them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gdn_jax.checkpoints.hf_layer import HFCheckpoint
from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.errors import OracleError
from gdn_jax.layer.params import param_dims
from gdn_jax.verify.draw import SCHEME, draw_inputs, draw_weights
from gdn_jax.verify.oracles import oracle_file


@dataclasses.dataclass(frozen=True)
class Subject:
    """One layer to verify.

    ``weights`` are float32 by the field names of GDNParams, ``xs`` float32 [T, D]; ``oracle`` is
    what transformers computed for the first tokens of ``xs``, or None with the reason in
    ``no_oracle``.
    """

    name: str
    cfg: GDNConfig
    weights: Mapping[str, np.ndarray]
    xs: np.ndarray
    drawn: str
    oracle: oracle_file.Oracle | None
    no_oracle: str = ""

    @property
    def transformers(self) -> str:
        """One line on what stands for transformers in this run."""
        if self.oracle is None:
            return f"not compared: {self.no_oracle}"
        known = self.oracle.provenance
        versions = ", ".join(f"{n} {known[n]}" for n in ("transformers", "torch") if n in known)
        own = float(known["one_shot_OUT_max_rel"])
        return (
            f"{self.oracle.architecture}, {len(self.oracle.xs)} tokens, {versions}; its one-shot "
            f"path is {own:.1e} from its cached path"
        )


def from_preset(
    preset: str,
    tokens: int,
    oracle: str | None,
    *,
    seed: int | None = None,
    python: str | None = None,
) -> Subject:
    """A layer of a preset's shape with weights and inputs drawn from a seed.

    Args:
        preset: a name in PRESETS.
        tokens: T.
        oracle: "shipped", "live", "none", or the path of an oracle file; None takes the shipped one
            where there is one of this seed.
        seed: of the draw; the oracle file's own by default, 0 where there is no file.
        python: an interpreter that has torch and transformers, for "live".

    Raises:
        OracleError: no such oracle, or one that does not belong to this preset and seed.
    """
    cfg = PRESETS[preset]
    file, reason = None, "--oracle none"
    if oracle is None:
        path = oracle_file.shipped_oracle(preset)
        file = oracle_file.load_oracle(path, cfg) if path else None
        reason = f"no oracle ships for preset {preset}"
        if file and seed not in (None, file.seed):
            file, reason = None, f"{reason} and seed {seed}"
        seed = file.seed if file else seed
    elif oracle not in ("live", "none"):
        path = oracle_file.shipped_oracle(preset) if oracle == "shipped" else Path(oracle)
        if path is None:
            raise OracleError(
                f"no oracle ships for preset {preset}: give --oracle FILE, --oracle live "
                "(needs torch and transformers) or --oracle none"
            )
        file = oracle_file.load_oracle(path, cfg)
        if seed is not None and seed != file.seed:
            raise OracleError(f"{path}: made from seed {file.seed}; needed {seed}")
        seed = file.seed
    seed = 0 if seed is None else seed
    weights = oracle_file.redraw_weights(file) if file else draw_weights(cfg, seed)
    xs = draw_inputs(cfg, tokens, seed)
    if file is not None:
        shared = min(tokens, len(file.xs))
        if not np.array_equal(xs[:shared], file.xs[:shared]):
            raise OracleError(f"{oracle}: its inputs are not those drawn from seed {seed}")
    if oracle == "live":
        architecture = oracle_file.architecture_of(preset)
        file = oracle_file.compute_oracle(weights, cfg, xs, architecture, seed=seed, python=python)
    drawn = f"weights and inputs drawn by NumPy from seed {seed} ({SCHEME})"
    return Subject(preset, cfg, weights, xs, drawn, file, "" if file else reason)


def from_checkpoint(
    directory: str, layer: int, tokens: int, *, live: bool, seed: int = 0, python: str | None = None
) -> Subject:
    """A layer of a Hugging Face checkpoint with its real weights, on inputs drawn from a seed.

    Raises:
        CheckpointError: the layer cannot be loaded.
        OracleError: ``live`` without torch and transformers.
    """
    checkpoint = HFCheckpoint.open(directory)
    params = checkpoint.layer(layer)
    cfg = checkpoint.cfg
    weights = {name: np.asarray(getattr(params, name)) for name in param_dims(cfg)}
    xs = draw_inputs(cfg, tokens, seed)
    oracle = None
    if live:
        architecture = checkpoint.architecture
        oracle = oracle_file.compute_oracle(
            weights, cfg, xs, architecture, seed=seed, python=python
        )
    name = f"{Path(directory).name}, layer {layer}"
    drawn = f"weights from the checkpoint, inputs drawn by NumPy from seed {seed} ({SCHEME})"
    reason = "" if live else "no oracle file can hold these weights; --oracle live compares"
    return Subject(name, cfg, weights, xs, drawn, oracle, reason)
