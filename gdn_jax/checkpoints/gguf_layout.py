"""The tensors of a Gated DeltaNet layer in GGUF files: their names, and where each row lies.

Three architectures hold such layers, with the tensors ``blk.{i}.`` plus

=================  ============================  ===================================
field              ``qwen35``, ``qwen35moe``     ``qwen3next``
=================  ============================  ===================================
in_proj_qkv        attn_qkv.weight [C, D]        the same
in_proj_z          attn_gate.weight [HV·V, D]    the same
in_proj_b          ssm_beta.weight [HV, D]       ssm_ba.weight [2·HV, D], with a
in_proj_a          ssm_alpha.weight [HV, D]      ssm_ba.weight, with b
conv_weight        ssm_conv1d.weight [C, W]      the same
A_log              ssm_a [HV]: -exp(A_log)       the same
dt_bias            ssm_dt.bias [HV]              the same
norm_weight        ssm_norm.weight [V]           the same
out_proj           ssm_out.weight [D, HV·V]      the same
=================  ============================  ===================================

in NumPy's order of axes; GGUF names them the other way round.

- **Value heads.** ``qwen35`` and ``qwen35moe`` tile them: head ``j`` of the file reads the key head
  ``j % HK``. So the rows of v in attn_qkv and ssm_conv1d, of attn_gate, ssm_beta, ssm_alpha, ssm_a
  and ssm_dt, and the columns of ssm_out, are permuted against a safetensors file, where head ``h``
  reads ``h // (HV // HK)``. ``qwen3next`` keeps that grouped order.
- **Fused tensors.** ssm_ba has HK groups of rows [b r | a r] with ``r = HV / HK``. Older
  ``qwen3next`` files have ssm_in.weight in place of attn_qkv and attn_gate: HK groups of
  [q K | k K | v r·V | z r·V].
- **Norms.** Of a model's norms GGUF stores 1 + w, but this layer's own norm as it is.
- **Extra.** Files written here also hold ssm_a_log [HV], A_log itself in the order of ssm_a: many
  values of A_log near 0 share a float32 ``-exp(A_log)``, and with it every bit comes back.

Source: the converter and the graphs of llama.cpp for these architectures.
"""

import dataclasses

import numpy as np

from gdn_jax.config import GDNConfig
from gdn_jax.layer.params import param_dims

TILED = {"qwen35": True, "qwen35moe": True, "qwen3next": False}
"""The architectures that are read and written, and whether their value heads are tiled."""

EXACT_A_LOG = "ssm_a_log"

_NAMES = {
    "in_proj_qkv": "attn_qkv.weight",
    "in_proj_z": "attn_gate.weight",
    "in_proj_b": "ssm_beta.weight",
    "in_proj_a": "ssm_alpha.weight",
    "conv_weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm_weight": "ssm_norm.weight",
    "out_proj": "ssm_out.weight",
}
FUSED_QKVZ, _FUSED_BA = "ssm_in.weight", "ssm_ba.weight"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a field lies: its row i is row ``rows[i]`` of ``tensor``.

    The columns of its value head h are those of head ``heads[h]`` in the file; None keeps the
    order of columns.
    """

    tensor: str
    rows: np.ndarray
    heads: np.ndarray | None = None

    def gather(self, x: np.ndarray) -> np.ndarray:
        """The field, from the tensor [N, ..], a copy."""
        return self.columns(x[self.rows])

    def columns(self, field: np.ndarray) -> np.ndarray:
        """The field, from its rows as they lie in the file."""
        return field if self.heads is None else _by_head(field, self.heads)

    def part(self, first: int, last: int) -> "Place":
        """Where rows ``first`` to ``last - 1`` of the field lie."""
        return dataclasses.replace(self, rows=self.rows[first:last])

    def scatter(self, field: np.ndarray, x: np.ndarray) -> None:
        """Inverse of :meth:`gather`: put the field where it lies in the tensor [N, ..]."""
        x[self.rows] = field if self.heads is None else _by_head(field, np.argsort(self.heads))


def places(cfg: GDNConfig, architecture: str, *, fused_qkvz: bool = False) -> dict[str, Place]:
    """The place of every field of GDNParams."""
    HK, K, V, r = cfg.num_k_heads, cfg.head_k_dim, cfg.head_v_dim, cfg.heads_per_key
    order = np.arange(cfg.num_v_heads)
    if TILED[architecture]:
        order = order.reshape(r, HK).T.ravel()
    values = _expand(order, V)
    qkv = np.concatenate([np.arange(2 * cfg.key_dim), 2 * cfg.key_dim + values])
    rows = {"in_proj_qkv": qkv, "in_proj_z": values, "conv_weight": qkv}
    rows |= dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), order)
    rows |= {"norm_weight": np.arange(V), "out_proj": np.arange(cfg.d_model)}
    moved = None if np.array_equal(order, np.sort(order)) else order
    heads = {"out_proj": moved}
    found = {f: Place(name, rows[f], heads.get(f)) for f, name in _NAMES.items()}
    if architecture == "qwen3next":
        b, a = _groups(HK, r, r)
        found |= {"in_proj_b": Place(_FUSED_BA, b), "in_proj_a": Place(_FUSED_BA, a)}
    if fused_qkvz:
        q, k, v, z = _groups(HK, K, K, r * V, r * V)
        found["in_proj_qkv"] = Place(FUSED_QKVZ, np.concatenate([q, k, v]))
        found["in_proj_z"] = Place(FUSED_QKVZ, z)
    return found


def tensor_shapes(cfg: GDNConfig, found: dict[str, Place]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the places name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for field, dims in param_dims(cfg).items():
        name = found[field].tensor
        rows = shapes[name][0] if name in shapes else 0
        shapes[name] = (rows + dims[0][1], *(size for _, size in dims[1:]))
    return shapes


def to_ssm_a(A_log: np.ndarray) -> np.ndarray:
    """``-exp(A_log)``, rounded once to float32."""
    with np.errstate(over="ignore", under="ignore"):
        return (-np.exp(A_log.astype(np.float64))).astype(np.float32)


def from_ssm_a(ssm_a: np.ndarray) -> np.ndarray:
    """``log(-ssm_a)``, rounded once to float32."""
    return np.log(-ssm_a.astype(np.float64)).astype(np.float32)


def _expand(heads: np.ndarray, width: int) -> np.ndarray:
    """Heads as the indices of their ``width`` entries."""
    return (heads[:, None] * width + np.arange(width)).ravel()


def _groups(count: int, *sizes: int) -> list[np.ndarray]:
    """The rows of each part, where ``count`` groups of rows hold the parts one after the other."""
    rows = np.arange(count * sum(sizes)).reshape(count, -1)
    return [part.ravel() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def _by_head(x: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """x [N, M, ..], whose axis 1 has an equal part for each head, with its heads in this order."""
    return x[:, _expand(heads, x.shape[1] // len(heads))]
