"""A whole model of random int4 weights: steps by batch and by position, and a prompt."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gdn_jax.bench.suites import model_decode, model_prefill
from gdn_jax.bench.workload import Workload, on_gpu
from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.errors import ConfigError
from gdn_jax.models.config import MODEL_PRESETS, ModelConfig


class Sizes(NamedTuple):
    """Positions at which steps run, every batch at the first one; tokens of the prompt."""

    positions: tuple[int, ...]
    prompt: int


GPU, CPU = Sizes((100, 10_000, 100_000), 8192), Sizes((100, 1000), 128)
_LAYERS, _VOCABULARY = 4, 4096
"""The sizes where the device is no GPU."""


def workloads(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """The rows of the model that has such layers; on a CPU those of its first four layers.

    Raises:
        ConfigError: no known model has such layers.
    """
    found = next((model for model in MODEL_PRESETS.values() if model.gdn == cfg), None)
    if found is None:
        known = [name for name in MODEL_PRESETS if name in PRESETS]
        needed = f"needed --preset {' or '.join(known)}"
        raise ConfigError(f"bench: suite model has no model of these layers; {needed}")
    if on_gpu():
        return rows(found, batches, backends, GPU)
    kinds = found.layer_types[:_LAYERS]
    few = dataclasses.replace(found, layer_types=kinds, vocab_size=_VOCABULARY)
    return rows(few, batches, backends, CPU)


def rows(
    cfg: ModelConfig, batches: Sequence[int], backends: Sequence[str], sizes: Sizes
) -> Iterator[Workload]:
    """Steps by batch and by position, then a prompt.

    On a GPU, XLA's rows are included only where they are asked for by name.
    """
    first, *others = sizes.positions
    for backend in backends[-1:] if on_gpu() else backends:
        for batch in batches:
            yield model_decode.workload(cfg, backend, batch, first)
        for position in others:
            yield model_decode.workload(cfg, backend, 1, position)
        yield model_prefill.workload(cfg, backend, sizes.prompt)
