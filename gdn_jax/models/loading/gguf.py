"""The weights of a whole model in a GGUF file; all are checked before any is read.

:mod:`gdn_jax.checkpoints.gguf_layout` describes the linear layers; besides, a ``qwen35`` file has

=================  ===============================  =========================================
weight             tensor                           as in a safetensors file, but
=================  ===============================  =========================================
embedding, head    token_embd, output
norm               output_norm                      1 + w
input_norm         blk.{i}.attn_norm                1 + w
mlp_norm           blk.{i}.post_attention_norm      1 + w
q_proj .. o_proj   blk.{i}.attn_q, _k, _v, _output  rows in the same order: query, gate by head
q_norm, k_norm     blk.{i}.attn_q_norm, _k_norm     1 + w
gate_proj ..       blk.{i}.ffn_gate, _up, _down
=================  ===============================  =========================================

each with ``.weight``. In a file without output, the head is the embedding. Blocks after the last
layer predict further tokens, and are skipped.

Source: the converter and the graphs of llama.cpp.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Self

import gguf
import numpy as np

from gdn_jax.checkpoints import gguf_layout
from gdn_jax.checkpoints.gguf_layout import Place
from gdn_jax.checkpoints.gguf_metadata import Metadata
from gdn_jax.checkpoints.gguf_reader import GGUFFile, Type, q4_words
from gdn_jax.errors import CheckpointError, ConfigError
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.loading.stored import Stored
from gdn_jax.models.loading.weights import WeightSpec, refuse_faults, summary

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_NAMES = {
    "input_norm": "attn_norm",
    "mlp_norm": "post_attention_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.q_norm": "attn_q_norm",
    "mixer.k_norm": "attn_k_norm",
}
_ONE_MORE = {"norm", "input_norm", "mlp_norm", "q_norm", "k_norm"}
_ARCHITECTURE = "qwen35"


@dataclasses.dataclass(frozen=True)
class GGUFModel:
    """A file, and the configuration of the whole model in it."""

    cfg: ModelConfig
    file: GGUFFile

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read the header.

        Raises:
            CheckpointError: the file is not GGUF, not a whole model, truncated, or of another
                architecture; or its metadata are missing or out of range.
        """
        meta = Metadata.open(path)
        file = GGUFFile.of(meta)
        return cls(_config(meta, file), file)

    def find(self, table: Mapping[str, WeightSpec]) -> tuple[dict[str, Stored], str]:
        """Every weight of the table by name, and a line on what the file holds and what is skipped.

        Where the head is the embedding and that is Q4_0, the result has ``head`` too, with the
        same tensor's blocks.

        Raises:
            CheckpointError: all tensors at once that are missing, unexpected, or of another shape
                or type.
        """
        tensors = self.file.tensors
        places = {name: self._place(name, weight) for name, weight in table.items()}
        wanted = {place.tensor for place in places.values()}
        exact = {f"blk.{i}.{gguf_layout.EXACT_A_LOG}" for i in self.cfg.linear_layers}
        left = tensors.keys() - wanted - exact
        skipped = {name for name in left if self._predicts(name)}
        wrong, other = [], []
        for name, weight in table.items():
            if (tensor := tensors.get(places[name].tensor)) is None:
                continue
            found = [int(n) for n in reversed(tensor.shape)]
            if found != list(weight.shape):
                wrong.append(f"{tensor.name} is {found}, needed {list(weight.shape)}")
            if not _readable(tensor.tensor_type):
                other.append(f"{tensor.name} is {tensor.tensor_type.name}")
        refuse_faults(
            str(self.file.path),
            {
                "missing": wanted - tensors.keys(),
                "unexpected": left - skipped,
                "of another shape": wrong,
                "of a type that cannot be read": other,
            },
        )
        stored = {name: self._stored(name, table[name], place) for name, place in places.items()}
        line = summary(self.file.path, stored, {"multi-token prediction": len(skipped)})
        if self.cfg.tied and tensors[_EMBEDDING].tensor_type == Type.Q4_0:
            head = WeightSpec(table["embedding"].shape, "projection")
            stored["head"] = self._stored("head", head, places["embedding"])
        return stored, line

    def _place(self, name: str, weight: WeightSpec) -> Place:
        rows = np.arange(weight.shape[0])
        if not name.startswith("blocks."):
            named = {"embedding": _EMBEDDING, "head": _HEAD, "norm": "output_norm.weight"}
            return Place(named[name], rows)
        _, layer, name = name.split(".", 2)
        if name in _NAMES:
            return Place(f"blk.{layer}.{_NAMES[name]}.weight", rows)
        place = gguf_layout.places(self.cfg.gdn, _ARCHITECTURE)[name.removeprefix("mixer.")]
        return dataclasses.replace(place, tensor=f"blk.{layer}.{place.tensor}")

    def _predicts(self, name: str) -> bool:
        block = re.match(r"blk\.(\d+)\.", name, re.ASCII)
        return block is not None and int(block[1]) >= len(self.cfg.layer_types)

    def _stored(self, name: str, weight: WeightSpec, place: Place) -> Stored:
        tensor = self.file.tensors[place.tensor]

        def rows(a: int, b: int) -> np.ndarray:
            part = place.part(a, b)
            x = gguf.quants.dequantize(tensor.data[part.rows], tensor.tensor_type)
            x = part.columns(x)
            if name.endswith(".A_log"):
                return self.file.a_log(tensor.name, x, part)
            return x - np.float32(1) if name.rpartition(".")[2] in _ONE_MORE else x

        def int4(a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
            return q4_words(self.file.path, tensor, place.part(a, b), self.cfg.gdn.head_v_dim)

        kept = weight.role == "projection" and tensor.tensor_type == Type.Q4_0
        where = str(self.file.path)
        return Stored(where, tensor.name, int(tensor.n_bytes), rows, int4 if kept else None)


def _readable(kind: Type) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _config(meta: Metadata, file: GGUFFile) -> ModelConfig:
    """The sizes of the model, from metadata and from the shape of its embedding."""
    if meta.arch != _ARCHITECTURE:
        raise CheckpointError(
            f"{meta.path}: architecture is {meta.arch!r}; needed {_ARCHITECTURE!r}, a dense model"
        )
    if _EMBEDDING not in file.tensors:
        raise CheckpointError(f"{meta.path}: no tensor {_EMBEDDING}; needed a whole model")
    scaling = meta.get(gguf.Keys.Rope.SCALING_TYPE, "none")
    if scaling != "none":
        key = gguf.Keys.Rope.SCALING_TYPE.format(arch=meta.arch)
        raise CheckpointError(f"{meta.path}: metadata {key} is {scaling!r}; needed 'none'")
    attention, rope = gguf.Keys.Attention, gguf.Keys.Rope
    head_dim, value_dim = (meta.integer(k) for k in (attention.KEY_LENGTH, attention.VALUE_LENGTH))
    if head_dim != value_dim:
        raise CheckpointError(
            f"{meta.path}: heads of {head_dim} keys and {value_dim} values; needed as many"
        )
    layers = len(file.layer_types) - meta.predicting_layers()
    try:
        return ModelConfig(
            gdn=file.cfg,
            layer_types=file.layer_types[:layers],
            vocab_size=int(file.tensors[_EMBEDDING].shape[-1]),
            hidden_size=file.cfg.d_model,
            intermediate_size=meta.integer(gguf.Keys.LLM.FEED_FORWARD_LENGTH),
            num_attention_heads=meta.integer(attention.HEAD_COUNT),
            num_key_value_heads=meta.integer(attention.HEAD_COUNT_KV),
            head_dim=head_dim,
            rotary_dim=meta.integer(rope.DIMENSION_COUNT),
            rope_theta=float(meta.get(rope.FREQ_BASE)),
            norm_eps=file.cfg.norm_eps,
            tied=_HEAD not in file.tensors,
        )
    except ConfigError as error:
        raise CheckpointError(f"{meta.path}: {error}") from None
