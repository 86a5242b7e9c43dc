"""Everything between the two projections in one launch."""

from collections.abc import Iterator, Sequence

from gdn_jax.bench.delta import sizes
from gdn_jax.bench.subject import Prepared, Subject
from gdn_jax.config import GDNConfig
from gdn_jax.errors import BackendUnavailableError


def subjects(cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]) -> Iterator[Subject]:
    """The middle kernel, which XLA has no counterpart of."""
    for batch in batches if "pallas" in backends else ():
        shape, moved, flops = sizes(cfg, batch)
        yield Subject("middle", "pallas", shape, batch, moved, flops, 1, _make)


def _make() -> Prepared:
    raise BackendUnavailableError("there is no middle kernel yet")
