"""Gated DeltaNet layers written to GGUF files, and the int4 files of ``gdn-jax quantize``."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from gdn_jax._core.checks import check_finite
from gdn_jax._core.files import atomic_path
from gdn_jax.checkpoints import gguf_layout
from gdn_jax.checkpoints.gguf_metadata import RECURRENT_LAYERS
from gdn_jax.checkpoints.gguf_reader import Type
from gdn_jax.checkpoints.hf_layer import HFCheckpoint, check_linear_layer
from gdn_jax.config import FULL, LINEAR, GDNConfig
from gdn_jax.errors import CheckpointError, QuantizationError, ShapeError, UnknownNameError
from gdn_jax.layer.params import LARGE, GDNParams, check_params, param_dims
from gdn_jax.quant.codecs import BLOCK_BYTES, q4_to_gguf_blocks
from gdn_jax.quant.q4array import GROUP, Q4Array
from gdn_jax.quant.quantize import RULES, quantize_q4

_NAME = "Gated DeltaNet layers"
_DESCRIPTION = "The linear attention of these layers only, not a whole model"
_OF_HF = {"qwen3_5": "qwen35", "qwen3_next": "qwen3next"}


def write_gguf(
    path: str | os.PathLike[str],
    layers: Mapping[int, GDNParams],
    cfg: GDNConfig,
    *,
    architecture: str = "qwen35",
    layer_types: Sequence[str] | None = None,
) -> None:
    """Write layers to a GGUF file, atomically; :func:`load_gguf_layer` gives every bit back.

    The file has the names and conventions of :mod:`gdn_jax.checkpoints.gguf_layout`. It holds
    these layers only, without the norms before them, embeddings or vocabulary: it cannot be run as
    a model. A Q4Array is written as Q4_0, float32 as F32, bfloat16 as BF16, float16 as F16. All of
    it is in host memory until the file is complete.

    Args:
        path: the file.
        layers: weights by the layer's index in its model.
        cfg: the layers' sizes.
        architecture: ``"qwen35"`` or ``"qwen35moe"``, with tiled value heads, or ``"qwen3next"``.
        layer_types: ``linear_attention`` or ``full_attention`` for every layer of the model;
            None makes all of them linear, up to the last one given.

    Raises:
        ShapeError: no layers, or weights that do not fit ``cfg``.
        UnknownNameError: no such architecture.
        CheckpointError: a layer that is not linear attention; a number that is not finite, or
            exp(A_log) beyond float32; an int4 ``out_proj`` with tiled heads whose width is not a
            multiple of 32. Nothing is written.
    """
    where = "write_gguf"
    _check_architecture(where, architecture)
    if not isinstance(layers, Mapping) or not layers:
        raise ShapeError(f"{where}: layers is {layers!r}; needed weights by layer index")
    count = 1 + max((i for i in layers if isinstance(i, int) and i > 0), default=0)
    types = (LINEAR,) * count if layer_types is None else tuple(layer_types)
    for layer, params in layers.items():
        check_linear_layer(where, types, layer)
        check_params(f"{where}: layer {layer}", params, cfg)
    _write(path, sorted(layers.items()), cfg, architecture, types)


def quantize_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    layers: Iterable[int] | None,
    out: str | os.PathLike[str],
    *,
    rule: str = "q4_0",
    progress: Callable[[str], AbstractContextManager[None]] | None = None,
) -> tuple[int, ...]:
    """Quantise linear attention layers of a Hugging Face directory into a GGUF file.

    ``in_proj_qkv``, ``in_proj_z`` and ``out_proj`` become Q4_0. The six small tensors stay
    float32: together they are under one part in a hundred of a layer's weights, and A_log and
    dt_bias sit in an exponential that is applied at every token. The file is ``qwen35`` or
    ``qwen3next``, as the directory is, and holds these layers only (:func:`write_gguf`).

    Args:
        checkpoint_dir: the directory with config.json and the weights.
        layers: indices of linear attention layers; None takes all of them.
        out: the file to write.
        rule: of :func:`gdn_jax.quantize_q4`.
        progress: given a layer's name, a context manager around the work on it.

    Returns:
        The layers written.

    Raises:
        CheckpointError, ConfigError: a layer that does not exist or is full attention; a width
            that is not a multiple of 32; anything that loading or writing refuses.
        UnknownNameError: no such rule.
        QuantizationError: a scale beyond float16, with layer, projection, row and group.
    """
    if rule not in RULES:
        raise UnknownNameError(f"quantize: no rule {rule!r}; there are {', '.join(RULES)}")
    checkpoint = HFCheckpoint.open(checkpoint_dir)
    cfg, architecture = checkpoint.cfg, _OF_HF[checkpoint.architecture]
    chosen = checkpoint.linear_layers if layers is None else tuple(sorted(set(layers)))
    for layer in chosen:
        check_linear_layer(str(checkpoint.path), checkpoint.layer_types, layer)
    if not chosen:
        raise CheckpointError(f"{checkpoint.path}: no layers to quantise")
    for name in LARGE:
        width = dict(param_dims(cfg))[name][1]
        if width[1] % GROUP:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has {width[0]} = {width[1]} columns; int4 needs a "
                f"multiple of {GROUP}"
            )
    _check_heads(str(checkpoint.path), cfg, architecture)
    stage = progress or (lambda _: contextlib.nullcontext())

    def quantized() -> Iterator[tuple[int, GDNParams]]:
        for layer in chosen:
            with stage(f"layer {layer}"):
                params = checkpoint.layer(layer)
                yield layer, dataclasses.replace(params, **_quantize(layer, params, rule))

    _write(out, quantized(), cfg, architecture, checkpoint.layer_types)
    return chosen


def _quantize(layer: int, params: GDNParams, rule: str) -> dict[str, Q4Array]:
    done = {}
    for name in LARGE:
        try:
            done[name] = quantize_q4(getattr(params, name), rule)
        except QuantizationError as error:
            raise QuantizationError(f"layer {layer}, {name}: {error}") from None
    return done


def _write(
    path: str | os.PathLike[str],
    layers: Iterable[tuple[int, GDNParams]],
    cfg: GDNConfig,
    architecture: str,
    layer_types: tuple[str, ...],
) -> None:
    with (
        atomic_path(path) as whole,
        contextlib.closing(gguf.GGUFWriter(whole, architecture)) as writer,
    ):
        _add_metadata(writer, cfg, layer_types)
        for layer, params in layers:
            for name, x in _tensors(f"{path}: not written", layer, params, cfg, architecture):
                writer.add_tensor(name, *x)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _add_metadata(writer: gguf.GGUFWriter, cfg: GDNConfig, layer_types: tuple[str, ...]) -> None:
    writer.add_name(_NAME)
    writer.add_description(_DESCRIPTION)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(len(layer_types))
    writer.add_embedding_length(cfg.d_model)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_ssm_conv_kernel(cfg.conv_width)
    writer.add_ssm_state_size(cfg.head_k_dim)
    writer.add_ssm_group_count(cfg.num_k_heads)
    writer.add_ssm_time_step_rank(cfg.num_v_heads)
    writer.add_ssm_inner_size(cfg.value_dim)
    recurrent = [kind == LINEAR for kind in layer_types]
    writer.add_array(RECURRENT_LAYERS.format(arch=writer.arch), recurrent)
    interval = 1 + layer_types.index(FULL) if FULL in layer_types else len(layer_types) + 1
    if recurrent == [(i + 1) % interval != 0 for i in range(len(recurrent))]:
        writer.add_full_attention_interval(interval)


def _tensors(
    where: str, layer: int, params: GDNParams, cfg: GDNConfig, architecture: str
) -> Iterator[tuple[str, tuple[np.ndarray, Any, Any]]]:
    """The tensors of a layer by name, with the arguments that ``GGUFWriter.add_tensor`` takes."""
    places = gguf_layout.places(cfg, architecture)
    shapes = gguf_layout.tensor_shapes(cfg, places)
    stored: dict[str, np.ndarray] = {}
    for field, place in places.items():
        weight = getattr(params, field)
        name = f"{where}: layer {layer}"
        if isinstance(weight, Q4Array):
            if field == "out_proj":
                _check_heads(name, cfg, architecture)
            check_finite(name, f"{field} scale", np.asarray(weight.scales), CheckpointError)
            x = q4_to_gguf_blocks(weight).reshape(weight.shape[0], -1, BLOCK_BYTES)
        else:
            x = np.asarray(weight)
            check_finite(name, field, x, CheckpointError)
        rows = shapes[place.tensor][0]
        tensor = stored.setdefault(place.tensor, np.empty((rows, *x.shape[1:]), x.dtype))
        place.scatter(x, tensor)
    A_log = places["A_log"].tensor
    stored[gguf_layout.EXACT_A_LOG] = stored[A_log]
    stored[A_log] = gguf_layout.to_ssm_a(stored[A_log])
    if not ((stored[A_log] < 0) & np.isfinite(stored[A_log])).all():
        raise CheckpointError(f"{where}: layer {layer}: exp(A_log) is 0 or infinite in float32")
    for name, x in stored.items():
        yield f"blk.{layer}.{name}", _raw(x)


def _raw(x: np.ndarray) -> tuple[np.ndarray, None, Type | None]:
    """A tensor, or its bytes and their type if GGUF's type is not one of NumPy's."""
    if x.dtype == np.uint8:
        return x.reshape(len(x), -1), None, Type.Q4_0
    if x.dtype == ml_dtypes.bfloat16:
        return x.view(np.uint8), None, Type.BF16
    return x, None, None


def _check_architecture(where: str, architecture: str) -> None:
    if architecture not in gguf_layout.TILED:
        known = ", ".join(gguf_layout.TILED)
        raise UnknownNameError(f"{where}: no architecture {architecture!r}; there are {known}")


def _check_heads(where: str, cfg: GDNConfig, architecture: str) -> None:
    """Refuse an int4 out_proj if the file's order of heads would split its groups of columns."""
    if gguf_layout.TILED[architecture] and cfg.heads_per_key > 1 and cfg.head_v_dim % GROUP:
        raise CheckpointError(
            f"{where}: {architecture} tiles the value heads, and int4 groups of {GROUP} columns of "
            f"out_proj do not fit heads of {cfg.head_v_dim}; needed a multiple of {GROUP}, or "
            "architecture 'qwen3next', which keeps their order"
        )
