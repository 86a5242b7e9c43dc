"""Gated DeltaNet layers from Hugging Face directories, as ``transformers`` writes them."""

import dataclasses
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import FLOATS
from gdn_jax.checkpoints.gptq_awq import Packing
from gdn_jax.checkpoints.safetensors_dir import TensorFiles
from gdn_jax.config import DEFAULT_INTERVAL, FULL, LINEAR, GDNConfig, read_hf
from gdn_jax.errors import CheckpointError, ShapeError
from gdn_jax.layer.params import LARGE, GDNParams, param_dims

ARCHITECTURES = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
}
"""The ``model_type`` values that are read, and the tensor layout of each."""

_PREFIXES = ("model.language_model.layers.{}.linear_attn.", "model.layers.{}.linear_attn.")
HF_TENSORS = {
    "in_proj_qkv": "in_proj_qkv.weight",
    "in_proj_z": "in_proj_z.weight",
    "in_proj_b": "in_proj_b.weight",
    "in_proj_a": "in_proj_a.weight",
    "conv_weight": "conv1d.weight",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm_weight": "norm.weight",
    "out_proj": "out_proj.weight",
}
"""The tensor of a Qwen3.5 layer behind each field of :class:`gdn_jax.GDNParams`."""

_WEIGHT, _PACKED = ".weight", ".qweight"
_QKVZ, _BA = "in_proj_qkvz.weight", "in_proj_ba.weight"
_LARGE_TENSORS = {_QKVZ, *(HF_TENSORS[field] for field in LARGE)}


@dataclasses.dataclass(frozen=True)
class HFCheckpoint:
    """What the config.json of a Qwen3.5 or Qwen3-Next directory says, and its layers on demand.

    ``architecture`` is the tensor layout, ``"qwen3_5"`` or ``"qwen3_next"``; ``layer_types`` has
    ``linear_attention`` or ``full_attention`` for every layer of the model. ``packing`` is how
    GPTQ or AWQ packed the projections, None for a model that is not quantised; ``quantization``
    says it in words.
    """

    path: Path
    cfg: GDNConfig
    architecture: str
    layer_types: tuple[str, ...]
    packing: Packing | None = None

    @classmethod
    def open(cls, checkpoint_dir: str | os.PathLike[str]) -> Self:
        """Read config.json; no tensor is touched.

        Raises:
            CheckpointError: no such directory, an unknown ``model_type`` or activation, no
                valid layer kinds, or a quantisation other than those of :class:`Packing`.
            ConfigError: no config.json, or sizes in it that no layer can have.
        """
        path = Path(checkpoint_dir)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; needed a Hugging Face checkpoint")
        raw, origin = read_hf(path)
        text = raw.get("text_config")
        text = text if isinstance(text, Mapping) else raw
        model_type = str(text.get("model_type", raw.get("model_type")))
        if model_type not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{origin}: model_type is {model_type}; needed one of {known}")
        cfg = GDNConfig.from_hf(path)
        activation = text.get("hidden_act", "silu")
        if activation != "silu":
            raise CheckpointError(f"{origin}: hidden_act is {activation!r}; needed 'silu'")
        quantized = raw.get("quantization_config", text.get("quantization_config"))
        packing = None if quantized is None else Packing.from_config(quantized, origin)
        return cls(path, cfg, ARCHITECTURES[model_type], layer_types_of(text, origin), packing)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers that :meth:`layer` can load."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def quantization(self) -> str:
        """How the projections are stored and what becomes of them; empty if not quantised."""
        return "" if self.packing is None else str(self.packing)

    def layer(self, layer: int, *, dtype: Any = jnp.float32) -> GDNParams:
        """The weights of one linear attention layer; see :func:`load_hf_layer`."""
        large, small = _target_dtype(dtype), np.dtype(np.float32)
        check_linear_layer(str(self.path), self.layer_types, layer)
        files = TensorFiles.open(self.path)
        shapes = _stored_shapes(self.cfg, self.architecture)
        prefix, packed = self._find(files, layer, shapes)
        tensors = {
            name: self._read(
                files, prefix + name, shape, large if name in _LARGE_TENSORS else small, packed
            )
            for name, shape in shapes.items()
        }
        if self.architecture == "qwen3_next":
            tensors |= _unfuse(tensors.pop(_QKVZ), tensors.pop(_BA), self.cfg)
        tensors["conv1d.weight"] = tensors["conv1d.weight"][:, 0]
        # Popped, so that each host copy is freed as soon as its array is on the device.
        fields = {field: jnp.asarray(tensors.pop(name)) for field, name in HF_TENSORS.items()}
        return GDNParams(**fields)

    def _read(
        self,
        files: TensorFiles,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        packed: Container[str],
    ) -> np.ndarray:
        if self.packing is None or name not in packed:
            return files.read_as(name, shape, dtype)
        stem = name.removesuffix(_WEIGHT)
        return files.exactly(stem + _PACKED, self.packing.read(files, stem, shape), dtype)

    def _find(
        self, files: TensorFiles, layer: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[str, Container[str]]:
        """The prefix of the layer's tensor names, and which of them are packed.

        Checks that the layer has exactly these tensors, or packed ones in place of a matrix.
        """
        prefixes = [prefix.format(layer) for prefix in _PREFIXES]
        for prefix in prefixes:
            found = {name for name in files.places if name.startswith(prefix)}
            if found:
                break
        else:
            raise CheckpointError(f"{files.source}: no tensor under {' or '.join(prefixes)}")
        needed = {prefix + name for name in shapes}
        packed = set()
        if self.packing is not None:
            matrices = {prefix + name for name, shape in shapes.items() if len(shape) == 2}
            packed = {n for n in matrices if n.removesuffix(_WEIGHT) + _PACKED in found}
            for name in packed:
                needed.remove(name)
                needed.update(self.packing.tensors(name.removesuffix(_WEIGHT), found))
        faults = [f"no tensor {name}" for name in sorted(needed - found)]
        faults += [f"unexpected tensor {name}" for name in sorted(found - needed)]
        if faults:
            layout = f"a {self.architecture} layer has {', '.join(shapes)}"
            raise CheckpointError(f"{files.source}: {', '.join(faults)}; {layout}")
        return prefix, packed


def check_linear_layer(where: str, layer_types: Sequence[str], layer: Any) -> None:
    """Raise CheckpointError unless ``layer`` is the index of a linear attention layer."""
    count = len(layer_types)
    if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < count:
        raise CheckpointError(f"{where}: layer is {layer!r}; needed 0 to {count - 1}")
    if layer_types[layer] != LINEAR:
        linear = ", ".join(str(i) for i, kind in enumerate(layer_types) if kind == LINEAR)
        raise CheckpointError(
            f"{where}: layer {layer} is a {layer_types[layer]} layer; needed a {LINEAR} layer: "
            f"{linear or 'none'}"
        )


def load_hf_layer(
    checkpoint_dir: str | os.PathLike[str], layer: int, *, dtype: Any = jnp.float32
) -> GDNParams:
    """The weights of one linear attention layer of a Qwen3.5 or Qwen3-Next directory.

    Reads ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names, and of
    those only the tensors of this layer. Qwen3-Next's fused projections are taken apart. Stored
    bfloat16, float16 and float32 are read, and no value is ever rounded. Projections in GPTQ or
    AWQ int4 (:class:`gdn_jax.checkpoints.gptq_awq.Packing`) are dequantised, exactly, to float32;
    those that such a model leaves unquantised are read as usual.

    Args:
        checkpoint_dir: the directory with config.json and the weights.
        layer: index among all layers of the model, full-attention layers counted.
        dtype: float32, bfloat16 or float16, for ``in_proj_qkv``, ``in_proj_z`` and ``out_proj``;
            the six small tensors are always float32. float32 holds every stored value; to round
            on purpose, cast the loaded arrays.

    Raises:
        CheckpointError: not such a directory; another quantisation, or act-order; no such layer,
            or a full-attention layer; a tensor missing, unexpected, truncated, of another shape or
            dtype, not finite, or with values that ``dtype`` would round.
        ConfigError: no config.json, or sizes in it that no layer can have.
        ShapeError: ``dtype`` is none of the three.
    """
    return HFCheckpoint.open(checkpoint_dir).layer(layer, dtype=dtype)


def layer_types_of(text: Mapping[str, Any], origin: str) -> tuple[str, ...]:
    """The kind of every layer: ``layer_types``, or what ``full_attention_interval`` says.

    Raises:
        CheckpointError: another kind, or another number of layers than the configuration says.
    """
    kinds = text.get("layer_types")
    if kinds is None:
        count = _positive(text, "num_hidden_layers", None, origin)
        interval = _positive(text, "full_attention_interval", DEFAULT_INTERVAL, origin)
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(count))
    if not isinstance(kinds, list) or not kinds:
        raise CheckpointError(f"{origin}: layer_types is {kinds!r}; needed a list of layer kinds")
    for i, kind in enumerate(kinds):
        if kind not in (LINEAR, FULL):
            raise CheckpointError(
                f"{origin}: layer_types[{i}] is {kind!r}; needed {LINEAR} or {FULL}"
            )
    count = text.get("num_hidden_layers", len(kinds))
    if count != len(kinds):
        raise CheckpointError(
            f"{origin}: layer_types has {len(kinds)} entries; needed num_hidden_layers = {count!r}"
        )
    return tuple(kinds)


def _positive(text: Mapping[str, Any], name: str, default: int | None, origin: str) -> int:
    value = text.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{origin}: {name} is {value!r}; needed a positive integer")
    return value


def _target_dtype(dtype: Any) -> np.dtype:
    try:
        target = jnp.dtype(dtype)
    except TypeError:
        target = None
    if target is None or target not in [jnp.dtype(d) for d in FLOATS]:
        raise ShapeError(f"load_hf_layer: dtype is {dtype!r}; needed float32, bfloat16 or float16")
    return target


def _stored_shapes(cfg: GDNConfig, architecture: str) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a layer, by its name after the prefix."""
    dims = param_dims(cfg)
    shapes = {name: tuple(n for _, n in dims[field]) for field, name in HF_TENSORS.items()}
    shapes["conv1d.weight"] = (cfg.conv_dim, 1, cfg.conv_width)
    if architecture == "qwen3_next":
        rows = {
            _QKVZ: sum(shapes.pop(HF_TENSORS[field])[0] for field in ("in_proj_qkv", "in_proj_z")),
            _BA: sum(shapes.pop(HF_TENSORS[field])[0] for field in ("in_proj_b", "in_proj_a")),
        }
        shapes |= {name: (n, cfg.d_model) for name, n in rows.items()}
    return shapes


def _unfuse(qkvz: np.ndarray, ba: np.ndarray, cfg: GDNConfig) -> dict[str, np.ndarray]:
    """Qwen3-Next's fused rows, taken apart: HK groups of [q K, k K, v r·V, z r·V] and [b r, a r].

    r = HV/HK; the b rows come before the a rows.
    """
    K, r = cfg.head_k_dim, cfg.heads_per_key

    def split(fused: np.ndarray, *sizes: int) -> list[np.ndarray]:
        groups = fused.reshape(cfg.num_k_heads, sum(sizes), cfg.d_model)
        parts = np.split(groups, np.cumsum(sizes)[:-1], axis=1)
        return [part.reshape(-1, cfg.d_model) for part in parts]

    q, k, v, z = split(qkvz, K, K, r * cfg.head_v_dim, r * cfg.head_v_dim)
    b, a = split(ba, r, r)
    rows = {"in_proj_qkv": np.concatenate([q, k, v]), "in_proj_z": z}
    rows |= {"in_proj_b": b, "in_proj_a": a}
    return {HF_TENSORS[field]: x for field, x in rows.items()}
