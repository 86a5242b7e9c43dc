"""A pool of int4 matrices that layers are bound to by key."""

from collections.abc import Iterable, Iterator, Mapping

from gdn_jax.errors import ShapeError
from gdn_jax.quant.kernel_layout import Q4Kernel, check_int4
from gdn_jax.quant.q4array import Q4Array

Int4 = Q4Array | Q4Kernel


class Q4Pool:
    """Int4 matrices by key, which the pool owns: a host object, compared by identity.

    A layer bound to the pool (:meth:`gdn_jax.LayerBank.bind_q4`) holds keys, not arrays. Clearing
    or rebuilding starts a new :attr:`generation`, which makes every earlier binding stale, even
    when the new pool has the same keys and shapes; the old arrays are dropped, and their memory
    is freed unless the caller still holds them.

    Raises:
        ShapeError: a key that is not text, or a value that is neither a Q4Array nor a Q4Kernel,
            [N, K].
    """

    def __init__(self, arrays: Mapping[str, Int4] | None = None) -> None:
        self._arrays = self._checked("Q4Pool", arrays or {})
        self._generation = 0

    @property
    def generation(self) -> int:
        """How many times the pool was cleared or rebuilt."""
        return self._generation

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(w.nbytes for w in self._arrays.values())

    def rebuild(self, arrays: Mapping[str, Int4]) -> None:
        """Replace all matrices, checked first, so that a bad one leaves the pool unchanged."""
        self._arrays = self._checked("Q4Pool.rebuild", arrays)
        self._generation += 1

    def clear(self) -> None:
        """Drop every matrix."""
        self._arrays = {}
        self._generation += 1

    @staticmethod
    def _checked(where: str, arrays: Mapping[str, Int4]) -> dict[str, Int4]:
        if not isinstance(arrays, Mapping):
            found = type(arrays).__name__
            raise ShapeError(f"{where}: arrays is a {found}; needed a mapping of keys to Q4Array")
        for key, w in arrays.items():
            if not isinstance(key, str):
                raise ShapeError(f"{where}: key {key!r} is a {type(key).__name__}; needed text")
            check_int4(where, key, w, [("N", None), ("K", None)])
        return dict(arrays)

    def __getitem__(self, key: str) -> Int4:
        return self._arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def items(self) -> Iterable[tuple[str, Int4]]:
        """Keys and matrices."""
        return self._arrays.items()

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, key: object) -> bool:
        return key in self._arrays

    def __repr__(self) -> str:
        return f"Q4Pool({len(self)} matrices, {self.nbytes / 2**20:.1f} MiB)"
