"""Oracle files: what a ``transformers`` layer computes, kept without its weights."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from gdn_jax._core.checks import check_config
from gdn_jax._core.files import write_atomically
from gdn_jax._core.sealed import read_tensors
from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.errors import ConfigError, OracleError
from gdn_jax.layer.trace import trace_shapes
from gdn_jax.verify import draw
from gdn_jax.verify.oracles.oracle_live import Oracle, check_tensors, compute_oracle, oracle_shapes
from gdn_jax.verify.oracles.transformers_forward import ONE_SHOT

__all__ = [
    "Oracle",
    "architecture_of",
    "compute_oracle",
    "export_oracle",
    "load_oracle",
    "redraw_weights",
    "save_oracle",
    "shipped_oracle",
]

_FORMAT, _VERSION = "gdn-jax-oracle", "1"
_OWN = (
    "format",
    "version",
    "architecture",
    "config",
    "seed",
    "tokens",
    "weights_sha256",
    "payload_sha256",
)
_NEXT = ("qwen3-next-80b-a3b", "tiny-wide")
_NEEDED = "needed one written by gdn-jax oracle export"


def export_oracle(
    path: str | os.PathLike[str],
    cfg: GDNConfig,
    *,
    tokens: int,
    seed: int,
    architecture: str,
    python: str | os.PathLike[str] | None = None,
) -> Oracle:
    """Draw weights and inputs from a seed, run :func:`compute_oracle`, write the file atomically.

    Raises:
        OracleError: no tokens, a negative seed, a path that cannot be written, or no oracle.
    """
    for name, value, least in (("tokens", tokens, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OracleError(f"{path}: {name} is {value!r}; needed an integer from {least} up")
    if not Path(path).parent.is_dir():
        raise OracleError(f"{path}: no directory {Path(path).parent}; needed an existing one")
    check_config("export_oracle", cfg)
    xs = draw.draw_inputs(cfg, tokens, seed)
    weights = draw.draw_weights(cfg, seed)
    oracle = compute_oracle(weights, cfg, xs, architecture, seed=seed, python=python)
    save_oracle(path, oracle)
    return oracle


def save_oracle(path: str | os.PathLike[str], oracle: Oracle) -> None:
    """Write an oracle to a safetensors file, atomically.

    The file holds the inputs, the cached path's trace with the final S and HIST, and the one-shot
    OUT. The one-shot S would be its largest tensor and stays out: its distance to the cached one
    is in the metadata. ``payload_sha256`` covers every tensor and all other metadata.

    Raises:
        OracleError: the oracle does not fit its configuration, is not finite, or the file cannot
            be written; nothing is left behind then.
    """
    tensors = {"xs": oracle.xs, **oracle.trace, f"{ONE_SHOT}OUT": oracle.one_shot["OUT"]}
    check_tensors(f"{path}: not written", tensors, oracle_shapes(oracle.cfg, len(oracle.xs)))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    metadata = oracle.provenance | {
        "format": _FORMAT,
        "version": _VERSION,
        "architecture": oracle.architecture,
        "config": json.dumps(dataclasses.asdict(oracle.cfg)),
        "seed": json.dumps(oracle.seed),
        "tokens": str(len(oracle.xs)),
        "weights_sha256": oracle.weights_sha256,
    }
    metadata["payload_sha256"] = _payload_sha256(tensors, metadata)
    try:
        write_atomically(path, save(tensors, metadata))
    except OSError as error:
        raise OracleError(f"{path}: cannot be written ({error.strerror})") from None


def load_oracle(path: str | os.PathLike[str], cfg: GDNConfig | None = None) -> Oracle:
    """Read an oracle file, bit for bit.

    Args:
        path: a file written by :func:`save_oracle` or :func:`export_oracle`.
        cfg: the configuration it must be for; any when None.

    Raises:
        OracleError: the file is missing, truncated or not safetensors, not an oracle, of another
            version, altered, of another configuration than ``cfg``, lacks a tensor or holds one
            of the wrong shape or dtype, or a number that is not finite.
    """
    metadata, tensors = read_tensors(path, OracleError)
    if metadata.get("format") != _FORMAT:
        raise OracleError(f"{path}: not an oracle file; {_NEEDED}")
    if metadata.get("version") != _VERSION:
        found = metadata.get("version")
        raise OracleError(f"{path}: oracle version {found}; needed {_VERSION}")
    if metadata.get("payload_sha256") != _payload_sha256(tensors, metadata):
        raise OracleError(f"{path}: altered since it was written (checksum differs); {_NEEDED}")
    try:
        written_for = GDNConfig(**json.loads(metadata["config"]))
        seed, tokens = json.loads(metadata["seed"]), int(metadata["tokens"])
        architecture, weights_sha256 = metadata["architecture"], metadata["weights_sha256"]
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise OracleError(f"{path}: metadata cannot be read ({error}); {_NEEDED}") from None
    if cfg is not None and cfg != written_for:
        raise OracleError(f"{path}: an oracle for {written_for}; needed one for {cfg}")
    check_tensors(str(path), tensors, oracle_shapes(written_for, tokens))
    return Oracle(
        cfg=written_for,
        architecture=architecture,
        seed=seed,
        xs=tensors["xs"],
        trace={name: tensors[name] for name in trace_shapes(written_for)},
        one_shot={"OUT": tensors[f"{ONE_SHOT}OUT"]},
        provenance={key: value for key, value in metadata.items() if key not in _OWN},
        weights_sha256=weights_sha256,
    )


def shipped_oracle(preset_name: str) -> Path | None:
    """The oracle file that comes with the package for a preset, if there is one."""
    path = Path(__file__).parents[2] / "data" / f"{preset_name}.safetensors"
    return path if preset_name in PRESETS and path.is_file() else None


def architecture_of(preset_name: str) -> str:
    """The ``transformers`` model whose layer a preset stands for; the two small ones share out."""
    return "qwen3_next" if preset_name in _NEXT else "qwen3_5"


def redraw_weights(oracle: Oracle) -> dict[str, np.ndarray]:
    """The weights of an oracle, drawn again from its seed, by the field names of GDNParams.

    Raises:
        OracleError: the oracle has no seed, another draw scheme, or weights of another SHA-256.
    """
    scheme = oracle.provenance.get("draw")
    if oracle.seed is None or scheme != draw.SCHEME:
        raise OracleError(
            f"oracle: weights drawn by {scheme} from seed {oracle.seed}; needed {draw.SCHEME!r} "
            "and a seed"
        )
    weights = draw.draw_weights(oracle.cfg, oracle.seed)
    if (found := draw.weights_sha256(weights)) != oracle.weights_sha256:
        raise OracleError(
            f"oracle: seed {oracle.seed} draws weights of SHA-256 {found}; needed "
            f"{oracle.weights_sha256}"
        )
    return weights


def _payload_sha256(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    rest = {key: value for key, value in metadata.items() if key != "payload_sha256"}
    text = json.dumps([draw.weights_sha256(tensors), rest], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
