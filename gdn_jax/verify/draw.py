"""Weights and inputs that NumPy alone can redraw from a seed.

Numbers come from the raw stream of PCG64, which NumPy keeps stable across versions, through integer
and elementary float32 arithmetic; nothing depends on the sampling methods of ``Generator``.
Each tensor has a stream of its own, so the first rows of the inputs do not depend on how many
tokens are drawn.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.layer.params import param_dims

SCHEME = "pcg64-sum4 v1"
"""Named in oracle files: a change of any number below needs a new name."""

_LANE_MEAN = 2 * 65535
_LANE_STD = np.sqrt((65536.0**2 - 1) / 3)


def _raw(seed: int, stream: int, count: int) -> np.ndarray:
    return np.random.PCG64(np.random.SeedSequence((seed, stream))).random_raw(count)


def _normal(seed: int, stream: int, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal, unit variance, within ±3.47: the sum of four 16-bit lanes."""
    lanes = _raw(seed, stream, int(np.prod(shape))).view(np.uint16).reshape(-1, 4)
    total = lanes[:, 0].astype(np.int32)
    for j in (1, 2, 3):
        total += lanes[:, j]
    return ((total - _LANE_MEAN).astype(np.float32) / np.float32(_LANE_STD)).reshape(shape)


def _uniform(seed: int, stream: int, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """Uniform in [low, high), in float64, from the upper 53 bits of each word."""
    unit = (_raw(seed, stream, int(np.prod(shape))) >> np.uint64(11)) * 2.0**-53
    return (low + (high - low) * unit).reshape(shape)


def draw_weights(cfg: GDNConfig, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights by the field names of GDNParams, in the ranges of trained layers.

    Projections have standard deviation 1/sqrt(fan-in); taps are uniform in ±W**-0.5;
    ``exp(A_log)`` is uniform in (0.01, 16) and ``softplus(dt_bias)`` log-uniform in (1e-3, 1e-1);
    the norm weight has mean 1 and standard deviation 0.1.
    """
    weights = {}
    for stream, (name, dims) in enumerate(param_dims(cfg).items(), start=1):
        shape = tuple(size for _, size in dims)
        if name == "conv_weight":
            x = _uniform(seed, stream, shape, -(cfg.conv_width**-0.5), cfg.conv_width**-0.5)
        elif name == "A_log":
            x = np.log(_uniform(seed, stream, shape, 0.01, 16.0))
        elif name == "dt_bias":
            dt = np.exp(_uniform(seed, stream, shape, np.log(1e-3), np.log(1e-1)))
            x = dt + np.log(-np.expm1(-dt))
        elif name == "norm_weight":
            x = 1 + np.float32(0.1) * _normal(seed, stream, shape)
        else:
            x = _normal(seed, stream, shape)
            x *= np.float32(shape[-1] ** -0.5)
        weights[name] = x.astype(np.float32, copy=False)
    return weights


def draw_inputs(cfg: GDNConfig, tokens: int, seed: int) -> np.ndarray:
    """Nearly normal float32 inputs [T, D] of unit variance."""
    return _normal(seed, 0, (tokens, cfg.d_model))


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes and float32 bytes, in alphabetical order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}{weights[name].shape}".encode())
        digest.update(np.ascontiguousarray(weights[name], dtype=np.float32).data)
    return digest.hexdigest()


DRIFT_TOKENS = 512
"""Tokens over which an error may grow."""


def drift_config(backend: str | None) -> GDNConfig:
    """A layer small enough for as many tokens in float64, and wide enough for a named kernel."""
    return GDNConfig(128, 1, 2, 64, 128) if backend == "pallas" else PRESETS["tiny"]
