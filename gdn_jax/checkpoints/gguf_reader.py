"""Gated DeltaNet layers from GGUF files of the Qwen3.5 family."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from gdn_jax._core.checks import check_finite
from gdn_jax.checkpoints import gguf_layout
from gdn_jax.checkpoints.gguf_metadata import Metadata
from gdn_jax.checkpoints.hf_layer import check_linear_layer
from gdn_jax.config import LINEAR, GDNConfig
from gdn_jax.errors import CheckpointError
from gdn_jax.layer.params import LARGE, GDNParams
from gdn_jax.quant.codecs import BLOCK_BYTES, on_device, words_of_gguf_blocks
from gdn_jax.quant.q4array import GROUP

Type = gguf.GGMLQuantizationType
TYPES = (Type.Q4_0, Type.Q8_0, Type.F16, Type.BF16, Type.F32)
"""The tensor types whose every value this package holds exactly."""

_WAY_ROUND = (
    "requantise from the safetensors original with `gdn-jax quantize`, or convert it to Q8_0 or F16"
)


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file says of its model, and its Gated DeltaNet layers on demand.

    ``architecture`` is one of :data:`gdn_jax.checkpoints.gguf_layout.TILED`; ``layer_types`` has
    ``linear_attention`` or ``full_attention`` for every block; ``tensors`` are views of the file.
    """

    path: Path
    cfg: GDNConfig
    architecture: str
    layer_types: tuple[str, ...]
    tensors: Mapping[str, gguf.ReaderTensor] = dataclasses.field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read the header; no tensor is touched.

        Raises:
            CheckpointError: no such file, not a GGUF file, truncated, big-endian or a part of a
                split one; another architecture; metadata missing or out of range.
        """
        return cls.of(Metadata.open(path))

    @classmethod
    def of(cls, meta: Metadata) -> Self:
        """The file of this header; errors as :meth:`open`."""
        tensors = {tensor.name: tensor for tensor in meta.reader.tensors}
        return cls(meta.path, meta.config(), meta.arch, meta.layer_types(), tensors)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers that :meth:`layer` can load: linear attention, with tensors in this file."""
        return tuple(
            i
            for i, kind in enumerate(self.layer_types)
            if kind == LINEAR and f"blk.{i}.ssm_a" in self.tensors
        )

    def layer(self, layer: int) -> GDNParams:
        """The weights of one linear attention layer; see :func:`load_gguf_layer`."""
        check_linear_layer(str(self.path), self.layer_types, layer)
        prefix = f"blk.{layer}."
        places = gguf_layout.places(
            self.cfg,
            self.architecture,
            fused_qkvz=self.architecture == "qwen3next"
            and prefix + gguf_layout.FUSED_QKVZ in self.tensors,
        )
        shapes = gguf_layout.tensor_shapes(self.cfg, places)
        self._check_names(prefix, shapes)
        fields = {
            field: self._field(field, prefix + place.tensor, shapes[place.tensor], place)
            for field, place in places.items()
        }
        return GDNParams(**fields)

    def _field(
        self, field: str, name: str, shape: tuple[int, ...], place: gguf_layout.Place
    ) -> Any:
        large = field in LARGE
        tensor = self._checked(name, shape)
        if large and tensor.tensor_type == Type.Q4_0:
            return on_device(*q4_words(self.path, tensor, place, self.cfg.head_v_dim))
        x = place.gather(self._floats(tensor, large))
        return jnp.asarray(x if field != "A_log" else self.a_log(name, x, place))

    def _checked(self, name: str, shape: tuple[int, ...]) -> gguf.ReaderTensor:
        tensor = self.tensors[name]
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {list(found)}; needed {list(shape)}"
            )
        if tensor.tensor_type not in TYPES:
            needed = ", ".join(kind.name for kind in TYPES)
            raise CheckpointError(
                f"{self.path}: tensor {name} is {tensor.tensor_type.name}, which cannot be "
                f"loaded exactly; needed one of {needed}: {_WAY_ROUND}"
            )
        return tensor

    def _floats(self, tensor: gguf.ReaderTensor, keep: bool) -> np.ndarray:
        """Every value unchanged: float32, or with ``keep`` the stored float16 or bfloat16."""
        if keep and tensor.tensor_type == Type.BF16:
            x = np.ascontiguousarray(tensor.data).view(ml_dtypes.bfloat16)
        elif keep and tensor.tensor_type == Type.F16:
            x = tensor.data
        else:
            x = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        check_finite(str(self.path), tensor.name, x, CheckpointError)
        return x

    def a_log(self, name: str, ssm_a: np.ndarray, place: gguf_layout.Place) -> np.ndarray:
        """A_log from ``ssm_a = -exp(A_log)``, or as the file holds it, if it does."""
        if (ssm_a >= 0).any():
            raise CheckpointError(
                f"{self.path}: tensor {name} holds {ssm_a.max()}; needed -exp(A_log), below 0"
            )
        exact = name.removesuffix("ssm_a") + gguf_layout.EXACT_A_LOG
        if exact not in self.tensors:
            return gguf_layout.from_ssm_a(ssm_a)
        A_log = place.gather(self._floats(self._checked(exact, ssm_a.shape), False))
        if not np.allclose(gguf_layout.to_ssm_a(A_log), ssm_a, rtol=1e-6, atol=0):
            raise CheckpointError(f"{self.path}: tensor {name} is not -exp of tensor {exact}")
        return A_log

    def _check_names(self, prefix: str, names: Mapping[str, Any]) -> None:
        """Refuse a layer that lacks a tensor or has an unknown one."""
        ours = tuple(f"{prefix}{part}" for part in ("attn_qkv.", "attn_gate.", "ssm_"))
        found = {name for name in self.tensors if name.startswith(ours)}
        if not found:
            have = ", ".join(map(str, self.linear_layers)) or "none"
            raise CheckpointError(
                f"{self.path}: no tensor under {prefix}ssm_; the file holds the layers {have}"
            )
        needed = {prefix + name for name in names}
        faults = [f"no tensor {name}" for name in sorted(needed - found)]
        unexpected = found - needed - {prefix + gguf_layout.EXACT_A_LOG}
        faults += [f"unexpected tensor {name}" for name in sorted(unexpected)]
        if faults:
            what = f"a {self.architecture} layer has {', '.join(names)}"
            raise CheckpointError(f"{self.path}: {', '.join(faults)}; {what}")


def q4_words(
    path: Path, tensor: gguf.ReaderTensor, place: gguf_layout.Place, head_v_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Words and scales, on the host, of a Q4_0 tensor's rows and heads at ``place``, bit for bit.

    Raises:
        CheckpointError: a scale that is not finite, or heads that tear a group of columns apart.
    """
    blocks = np.asarray(tensor.data)[place.rows].reshape(len(place.rows), -1, BLOCK_BYTES)
    if place.heads is not None and blocks.shape[1] % len(place.heads):
        raise CheckpointError(
            f"{path}: tensor {tensor.name} is Q4_0 with tiled heads of {head_v_dim} columns; "
            f"needed a multiple of {GROUP}, so that a group lies in one head: {_WAY_ROUND}"
        )
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    check_finite(str(path), f"{tensor.name} scale", scales, CheckpointError)
    return words_of_gguf_blocks(place.columns(blocks))


def load_gguf_layer(path: str | os.PathLike[str], layer: int) -> GDNParams:
    """The weights of one linear attention layer of a GGUF file.

    Reads ``qwen35``, ``qwen35moe`` and ``qwen3next`` files and undoes their conventions, which
    :mod:`gdn_jax.checkpoints.gguf_layout` lists. No value is rounded:

    - ``in_proj_qkv``, ``in_proj_z`` and ``out_proj`` in Q4_0 become a Q4Array with the file's own
      blocks, bit for bit; F16 and BF16 stay float16 and bfloat16; Q8_0 and F32 become float32.
    - The six small tensors become float32 from any of these types. A_log alone is computed, as
      ``log(-ssm_a)`` rounded to float32, unless the file holds it, as files written here do.

    To load many layers, open the file once: ``GGUFFile.open(path)``, which also has ``cfg``.

    Args:
        path: the file; one that is split in parts has to be merged first.
        layer: index among all blocks of the model, full-attention layers counted.

    Raises:
        CheckpointError: not such a file, or another architecture; no such layer, or a
            full-attention layer; a tensor missing, unexpected, of another shape, of a type that
            cannot be loaded exactly (the message says what to do), or not finite; ssm_a not below
            0; ssm_out in Q4_0 with tiled heads whose width is not a multiple of 32.
    """
    return GGUFFile.open(path).layer(layer)
