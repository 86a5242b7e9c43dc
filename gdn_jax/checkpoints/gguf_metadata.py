"""The key-value pairs of a GGUF file: the sizes and the kinds of a model's layers."""

import os
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np

from gdn_jax.checkpoints import gguf_layout
from gdn_jax.config import DEFAULT_INTERVAL, FULL, LINEAR, GDNConfig
from gdn_jax.errors import CheckpointError, ConfigError

RECURRENT_LAYERS = "{arch}.attention.recurrent_layers"
"""The key of one boolean a block, which overrides the interval; the gguf package lacks it."""

SSM = gguf.Keys.SSM


class Metadata:
    """The key-value pairs of a file, with clear errors; ``{arch}`` in a key is filled in."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path, self.reader, self.arch = path, reader, ""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read the header; no tensor is touched.

        Raises:
            CheckpointError: no such file, not a GGUF file, truncated, big-endian or a part of a
                split one; another architecture.
        """
        path = Path(path)
        try:
            reader = gguf.GGUFReader(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file; needed a GGUF file") from None
        except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise CheckpointError(
                f"{path}: truncated or not a GGUF file ({' '.join(str(error).split())})"
            ) from None
        if reader.byte_order != "I":
            raise CheckpointError(f"{path}: written big-endian; needed a little-endian GGUF file")
        meta = cls(path, reader)
        parts = meta.integer(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, 1)
        if parts != 1:
            raise CheckpointError(
                f"{path}: one of {parts} parts of a split file; needed the whole, merged with "
                "`llama-gguf-split --merge`"
            )
        meta.arch = meta.get(gguf.Keys.General.ARCHITECTURE)
        if meta.arch not in gguf_layout.TILED:
            known = ", ".join(gguf_layout.TILED)
            raise CheckpointError(f"{path}: architecture is {meta.arch!r}; needed one of {known}")
        return meta

    def get(self, key: str, default: Any = None) -> Any:
        """A value, which the file must have when ``default`` is None."""
        key = key.format(arch=self.arch)
        field = self.reader.get_field(key)
        if field is None and default is None:
            raise CheckpointError(f"{self.path}: no metadata {key}")
        return default if field is None else field.contents()

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least ``least``."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            key = key.format(arch=self.arch)
            raise CheckpointError(
                f"{self.path}: metadata {key} is {value!r}; needed an integer, {least} or more"
            )
        return value

    def config(self) -> GDNConfig:
        """The sizes of a layer."""
        inner, HV = (self.integer(k) for k in (SSM.INNER_SIZE, SSM.TIME_STEP_RANK))
        if inner % HV:
            raise CheckpointError(
                f"{self.path}: metadata {SSM.INNER_SIZE.format(arch=self.arch)} is {inner}; "
                f"needed a multiple of the {HV} value heads"
            )
        eps = self.get(gguf.Keys.Attention.LAYERNORM_RMS_EPS)
        try:
            return GDNConfig(
                d_model=self.integer(gguf.Keys.LLM.EMBEDDING_LENGTH),
                num_k_heads=self.integer(SSM.GROUP_COUNT),
                num_v_heads=HV,
                head_k_dim=self.integer(SSM.STATE_SIZE),
                head_v_dim=inner // HV,
                conv_width=self.integer(SSM.CONV_KERNEL),
                # Stored as float32: the shortest decimal of that is what was written.
                norm_eps=float(str(np.float32(eps))) if isinstance(eps, float) else eps,
            )
        except ConfigError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def predicting_layers(self) -> int:
        """How many blocks, at the end, predict further tokens."""
        return self.integer(gguf.Keys.LLM.NEXTN_PREDICT_LAYERS, 0, least=0)

    def layer_types(self) -> tuple[str, ...]:
        """Each block's kind; those at the end that predict further tokens are full attention."""
        count = self.integer(gguf.Keys.LLM.BLOCK_COUNT)
        trunk = count - self.predicting_layers()
        interval = self.integer(gguf.Keys.LLM.FULL_ATTENTION_INTERVAL, DEFAULT_INTERVAL)
        regular = [(i + 1) % interval != 0 for i in range(count)]
        recurrent = self.get(RECURRENT_LAYERS, regular)
        if not isinstance(recurrent, list) or len(recurrent) < trunk:
            key = RECURRENT_LAYERS.format(arch=self.arch)
            raise CheckpointError(
                f"{self.path}: metadata {key} is {recurrent!r}; needed {count} booleans"
            )
        return tuple(LINEAR if i < trunk and recurrent[i] else FULL for i in range(count))
