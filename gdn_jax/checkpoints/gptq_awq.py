"""GPTQ and AWQ tensors of four bits: what config.json says of them, and their float32 values."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np

from gdn_jax._core.checks import check_finite
from gdn_jax.checkpoints.safetensors_dir import TensorFiles
from gdn_jax.errors import CheckpointError

NIBBLES = 8
"""Integers of four bits in a word; nibble p is at bit 4·p."""

_GPTQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the weights [N, K] of a layer are packed in int32 words.

    Groups of ``group_size`` columns, all K when it is -1, share a scale ``s``, float16 or bfloat16,
    and a zero point ``z``. With ``j = k // group_size``::

        value[n, k] = (q[k, n] - z[j, n]) · s[j, n]

    which float32 holds exactly: the difference has 5 bits, the scale 11.

    - ``"gptq"``: nibble p of ``qweight[i, n]``, int32 [K/8, N], is ``q[8·i + p, n]``; nibble p of
      ``qzeros[j, i]``, int32 [K/group_size, N/8], is ``z[j, 8·i + p] - zero_offset``. Version 1
      files have the offset 1, so their zero points are 1..16; version 2 files have 0. ``g_idx``
      int32 [K], which may be absent, has to be ``k // group_size``: no act-order.
    - ``"awq"``: nibble p of ``qweight[k, i]``, int32 [K, N/8], is ``q[k, 8·i + o[p]]`` with
      ``o = (0, 2, 4, 6, 1, 3, 5, 7)``, and qzeros likewise with z as it is.

    ``scales`` is [K/group_size, N] in both.
    """

    method: str
    group_size: int
    zero_offset: int
    act_order: bool = False

    @classmethod
    def from_config(cls, config: Any, origin: str) -> Self:
        """Read a ``quantization_config``.

        Raises:
            CheckpointError: another method, width, version or format; the message says what to do.
        """
        config = config if isinstance(config, Mapping) else {"quant_method": config}
        method = config.get("quant_method")
        _require(origin, "quant_method", method, ("gptq", "awq"))
        _require(origin, "bits", _first(config, "bits", "w_bit"), (4,))
        group_size = _first(config, "group_size", "q_group_size")
        if not isinstance(group_size, int) or group_size < -1 or group_size == 0:
            _require(origin, "group_size", group_size, ("a positive integer", -1))
        if method == "awq":
            version = str(_first(config, "version", "format") or "gemm").lower()
            _require(origin, "version", version, ("gemm",))
            _require(origin, "zero_point", config.get("zero_point", True), (True,))
            return cls(method, group_size, 0)
        _require(origin, "is_marlin_format", bool(config.get("is_marlin_format")), (False,))
        version = _first(config, "checkpoint_format", "format") or "gptq"
        _require(origin, "checkpoint_format", version, ("gptq", "gptq_v2"))
        act_order = bool(config.get("desc_act"))
        return cls(method, group_size, int(version == "gptq"), act_order)

    def __str__(self) -> str:
        groups = "whole rows" if self.group_size == -1 else f"groups of {self.group_size}"
        stored = "minus one" if self.zero_offset else "as they are"
        return (
            f"{self.method} int4 in {groups}, zero points stored {stored}, "
            "dequantised exactly to float32"
        )

    def tensors(self, stem: str, present: Iterable[str]) -> list[str]:
        """The names that stand for ``stem + ".weight"``; g_idx when it is ``present``."""
        names = [f"{stem}.{part}" for part in ("qweight", "qzeros", "scales")]
        g_idx = f"{stem}.g_idx"
        return [*names, g_idx] if self.method == "gptq" and g_idx in present else names

    def read(self, files: TensorFiles, stem: str, shape: tuple[int, ...]) -> np.ndarray:
        """The values [N, K] in float32.

        Raises:
            CheckpointError: a tensor missing, mis-shaped, of another dtype or not finite, sizes
                that cannot be packed like this, or act-order.
        """
        N, K = shape
        group = K if self.group_size == -1 else self.group_size
        if N % NIBBLES or K % NIBBLES or K % group:
            raise CheckpointError(
                f"{files.source}: tensor {stem}.qweight stands for [{N}, {K}]; needed multiples of "
                f"{NIBBLES} and of the group of {group} columns"
            )
        groups = K // group
        packed = (K // NIBBLES, N) if self.method == "gptq" else (K, N // NIBBLES)
        words = files.read(f"{stem}.qweight", packed, ("I32",))
        zeros = files.read(f"{stem}.qzeros", (groups, N // NIBBLES), ("I32",))
        scales = files.read(f"{stem}.scales", (groups, N), ("F16", "BF16")).astype(np.float32)
        if self.method == "gptq":
            self._refuse_act_order(files, stem, K, group)
            q = np.swapaxes(_unpack(words, _GPTQ_ORDER), -1, -2)
            z = _unpack(zeros, _GPTQ_ORDER).reshape(groups, 1, N) + np.int8(self.zero_offset)
        else:
            q = _unpack(words, _AWQ_ORDER)
            z = _unpack(zeros, _AWQ_ORDER).reshape(groups, 1, N)
        with np.errstate(over="ignore"):
            values = (q.reshape(groups, group, N) - z) * scales[:, None]
        values = np.ascontiguousarray(values.reshape(K, N).T)
        check_finite(str(files.source), f"{stem}, dequantised,", values, CheckpointError)
        return values

    def _refuse_act_order(self, files: TensorFiles, stem: str, K: int, group: int) -> None:
        name, found = f"{stem}.g_idx", None
        if name in files.places:
            found = files.read(name, (K,), ("I32",))
            if np.array_equal(found, np.arange(K) // group):
                return
        elif not self.act_order:
            return
        what = "is absent under desc_act" if found is None else f"is not k // {group}"
        raise CheckpointError(
            f"{files.source}: tensor {name} {what}: act-order is not read; quantise with "
            f"desc_act false, or {_WAY_ROUND}"
        )


_WAY_ROUND = "load the unquantised original of this model"


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _require(origin: str, name: str, found: Any, known: tuple[Any, ...]) -> None:
    if found not in known:
        needed = " or ".join(map(str, known))
        raise CheckpointError(
            f"{origin}: quantization_config has {name} {found!r}; needed {needed}, or {_WAY_ROUND}"
        )


def _unpack(words: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """int32 [.., M] -> int8 [.., M, 8]; entry ``order[p]`` of a word is its nibble p."""
    positions = [4 * order.index(entry) for entry in range(NIBBLES)]
    return np.stack([(words >> bit).astype(np.int8) & 15 for bit in positions], axis=-1)
