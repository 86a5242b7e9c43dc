"""The trace of one token: every operator's result, read back."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError
from gdn_jax.types import Array


def trace_shapes(cfg: GDNConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every entry of a trace, without the batch, in the order of the seven steps."""
    keys = (cfg.num_k_heads, cfg.head_k_dim)
    values = (cfg.num_v_heads, cfg.head_v_dim)
    heads = (cfg.num_v_heads,)
    return {
        "XC": (cfg.conv_dim,),
        "Z": (cfg.value_dim,),
        "B": heads,
        "A": heads,
        "BETA": heads,
        "G": heads,
        "XCV": (cfg.conv_dim,),
        "Q": keys,
        "K": keys,
        "ON": values,
        "ONN": values,
        "OUT": (cfg.d_model,),
        "S": (cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim),
        "HIST": (cfg.conv_width - 1, cfg.conv_dim),
    }


@jax.tree_util.register_pytree_node_class
class Trace(Mapping[str, Array]):
    """What every operator of one token produced, float32; a read-only mapping and a pytree.

    ======  ============  ==========================================================
    name    shape         value (a leading batch axis stands before each shape)
    ======  ============  ==========================================================
    XC      [C]           raw qkv projection, what the history stores
    Z       [HV·V]        gate of the output norm
    B, A    [HV]          raw b and a
    BETA    [HV]          sigmoid(b)
    G       [HV]          log decay
    XCV     [C]           after convolution and SiLU
    Q, K    [HK, K]       after step 4: normalised, and q scaled by K**-0.5
    ON      [HV, V]       output of the delta rule
    ONN     [HV, V]       after the gated norm
    OUT     [D]           output of the layer, before it is rounded to the dtype of x
    S       [HV, K, V]    new recurrent state
    HIST    [W-1, C]      new convolution history
    ======  ============  ==========================================================
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Array:
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"no trace entry {name!r}; there are {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Trace({', '.join(f'{n}{list(np.shape(x))}' for n, x in self.items())})"

    def nelems(self, name: str) -> int:
        """Number of elements of an entry, its batch axis included."""
        return math.prod(self[name].shape)

    def read_into(self, name: str, buffer: np.ndarray) -> int:
        """Copy an entry, flattened, to the start of a host buffer and return its element count.

        Raises:
            KeyError: no such entry.
            ShapeError: the buffer is not a writable C-contiguous array of the entry's dtype, or
                holds fewer elements than the entry. Nothing is written then.
        """
        entry, where = self[name], f"Trace.read_into({name!r})"
        if not isinstance(buffer, np.ndarray) or buffer.dtype != entry.dtype:
            found = getattr(buffer, "dtype", type(buffer).__name__)
            raise ShapeError(f"{where}: buffer is {found}; needed a numpy array of {entry.dtype}")
        if not (buffer.flags.c_contiguous and buffer.flags.writeable):
            raise ShapeError(
                f"{where}: buffer is read-only or strided; needed writable, contiguous"
            )
        count = self.nelems(name)
        if buffer.size < count:
            raise ShapeError(f"{where}: buffer holds {buffer.size} elements; needed {count}")
        buffer.reshape(-1)[:count] = np.asarray(entry).reshape(-1)
        return count

    def tree_flatten(self) -> tuple[list[Any], tuple[str, ...]]:
        return list(self._entries.values()), tuple(self._entries)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: list[Any]) -> "Trace":
        return cls(dict(zip(names, values, strict=True)))
