"""A model's weights from a Hugging Face directory or a GGUF file, tensor by tensor."""

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path

from gdn_jax.errors import CheckpointError
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.loading.gguf import GGUFModel
from gdn_jax.models.loading.hf import HFModel
from gdn_jax.models.loading.memory import check_fits
from gdn_jax.models.loading.stored import to_device
from gdn_jax.models.loading.weights import WeightSpec, assemble, check_weights, weight_table
from gdn_jax.models.params import ModelParams

Progress = Callable[[str, int, int], None]
_LOG = logging.getLogger(__name__)
_ADVICE = {
    "f32": "weights 'bf16' or 'q4'",
    "bf16": "weights 'q4', a smaller model, or a device with more memory",
    "q4": "a smaller model, or a device with more memory",
}


def config_of(source: str | os.PathLike[str]) -> ModelConfig:
    """The sizes of a model: of a Hugging Face directory, or of a GGUF file's metadata.

    Raises:
        CheckpointError: no such directory or file, or weights that this package cannot read.
        ConfigError: another architecture, or unknown settings.
    """
    return _opened(source).cfg


def load_params(
    source: str | os.PathLike[str],
    cfg: ModelConfig,
    *,
    weights: str = "bf16",
    kernel: bool = False,
    progress: Progress | None = None,
    notes: Callable[[str], None] | None = None,
) -> ModelParams:
    """All weights of a model on the default device, each converted once.

    First every header is checked, then that the device has room. Then tensors are read one after
    another, in pieces of rows by several threads, and each is on the device before the next is
    read: the host holds one tensor in its new form and a few pieces of it in the old one.

    :meth:`gdn_jax.models.loading.weights.WeightSpec.held` says which tensors ``weights`` concerns.
    Projections, and a head that is not the embedding, are float32, rounded to bfloat16, or
    quantised by :func:`gdn_jax.quantize_q4`. A head that is the embedding is the same array and
    keeps its width: the small models that are built so lose most by an int4 head.

    Projections that a GGUF file holds in Q4_0 keep the file's blocks bit for bit under ``"q4"`` and
    ``"bf16"``. So does a head in Q4_0, which is then an array beside the embedding. ``"f32"``
    dequantises them, exactly. Tensors of other GGUF types are dequantised, then treated like those
    of any file.

    Args:
        source: a Hugging Face directory, or a GGUF file of the whole model.
        cfg: the sizes that :func:`config_of` returns for it.
        weights: ``"bf16"``, ``"q4"`` or ``"f32"``.
        kernel: whether int4 is laid out for the kernels, where the sizes allow it.
        progress: called as ``progress(name, bytes_done, bytes_total)`` after each tensor, in bytes
            of the files.
        notes: called with one line that says what the files hold, what is skipped, and what is held
            wider than asked for; None logs that line.

    Raises:
        UnknownNameError: no such ``weights``.
        CheckpointError: files missing or truncated; all tensors that are missing, unexpected, or
            of another shape or type; a value that is not finite.
        QuantizationError: values that int4 cannot hold.
        DeviceMemoryError: the device has too little free memory.
    """
    check_weights("load_params", weights)
    table = weight_table(cfg)
    stored, line = dataclasses.replace(_opened(source), cfg=cfg).find(table)
    if weights != "f32" and "head" in stored:
        table["head"] = WeightSpec(table["embedding"].shape, "projection")
    held = {name: weight.held(weights) for name, weight in table.items()}
    held |= {name: "q4" for name in held if weights != "f32" and stored[name].int4}
    needed = sum(weight.nbytes(held[name]) for name, weight in table.items())
    check_fits(f"{source}, weights {weights}", needed, _ADVICE[weights])
    wider = [n for n, w in table.items() if w.role == "projection" and weights == "q4" != held[n]]
    if wider:
        line += f"; bf16, as their columns are no multiple of 32: {len(wider)}, like {wider[0]}"
    (notes or _LOG.info)(line)
    total, done, arrays = sum(stored[name].nbytes for name in table), 0, {}
    for name, weight in table.items():
        arrays[name] = to_device(stored[name], weight.shape, held[name], kernel=kernel)
        done += stored[name].nbytes
        if progress:
            progress(stored[name].name, done, total)
    return assemble(cfg, arrays)


def _opened(source: str | os.PathLike[str]) -> HFModel | GGUFModel:
    path = Path(source)
    if path.is_file():
        return GGUFModel.open(path)
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such directory or file; needed a Hugging Face checkpoint or a GGUF file"
        )
    return HFModel.open(path)
