"""What is timed: how to make it, how to check it, and what it has to move."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.bench.slope import Timing, slope

LIMIT = 5e-6
"""max_rel to float64 of sums of float32 products in any order, as in verify's int4 tier."""
CHAIN_BYTES = 1.1e9
"""A GPU's chain touches this much, so that no second-level cache holds it from call to call."""

_COPIES = 3
"""Freed arrays with NaN for every result."""

Measure = Callable[..., Timing]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A workload on the device.

    Attributes:
        check: the error, to be at most the workload's limit; runs the very function that is timed.
        run: queues one chain and gives the next carry; returns few arrays, since each output costs
            the host more than a small kernel the GPU.
        carry: what the first ``run`` gets; may be donated.
        detail: a few words on what was compared.
    """

    check: Callable[[], float]
    run: Callable[[Any], Any]
    carry: Any
    detail: str = "to float64"
    measured: Callable[[int], Timing] | None = None
    """Replaces ``run`` where the time is taken elsewhere: repetitions -> the time of one link."""
    memory: int | None = None
    """Bytes that the timed program holds at once, where that is worth a column."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One row of the table before it is measured; bytes and flops are those of one link.

    Attributes:
        kernel: what is timed; workloads of one kernel and shape are compared.
        backend: "xla", "pallas" or a peer's name.
        shape: the sizes but for the batch.
        batch: B.
        bytes: least bytes to be read and written, each once.
        flops: multiplications and additions.
        links: pieces of work in one chain, each on other weights or states.
        make: puts weights and inputs on the device.
        limit: of the check's error.
        unit: of the error.
        measure: :func:`slope` or :func:`blocking`.
        layers: in one link, where a link is a stack.
        tokens: of one layer, or of a whole model, in one link, over all sequences, where that is
            worth a column.
        matrix: whether its flops are compared with those of a large matrix product.
    """

    kernel: str
    backend: str
    shape: str
    batch: int
    bytes: int
    flops: int
    links: int
    make: Callable[[], Prepared]
    limit: float = LIMIT
    unit: str = "max_rel"
    measure: Measure = slope
    layers: int | None = None
    tokens: int | None = None
    matrix: bool = False

    @property
    def id(self) -> str:
        """``bench.<kernel>.<shape>`` with the backend in the kernel and the batch in the shape."""
        return f"bench.{self.kernel}_{self.backend}.{self.shape}_b{self.batch}"


def on_gpu() -> bool:
    """Whether the default device is a GPU."""
    return jax.default_backend() == "gpu"


def poisoned(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, its results written on a GPU where a NaN lay in every element.

    A first run, on copies since a function may donate, compiles and tells the sizes. Arrays of
    these sizes with all bits set, a NaN in every float type, are then made and freed, and the
    allocator gives their memory to the results. What is updated in place stays as it is.
    """
    if on_gpu():
        outputs = jax.block_until_ready(function(*jax.tree.map(jnp.copy, args)))
        sizes = [x.nbytes for x in jax.tree.leaves(outputs)]
        del outputs
        poison(sizes)
    return function(*args)


def peak_bytes(program: jax.stages.Compiled) -> int | None:
    """Arguments, results and temporaries of a program; None where XLA does not say.

    What the device has held since its start, which it also tells, is that of what ran before too.
    """
    found = program.memory_analysis()
    if found is None:
        return None
    held = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return held - found.alias_size_in_bytes


def poison(sizes: Sequence[int]) -> None:
    """Leave NaN in freed arrays of these bytes on a GPU, for the next results of such sizes."""
    if on_gpu():
        arrays = [jnp.full(n, 255, jnp.uint8) for n in sizes for _ in range(_COPIES)]
        for array in jax.block_until_ready(arrays):
            array.delete()


def rounds_for(nbytes: int, links: int) -> int:
    """How often a GPU's chain is walked in a call, so that the call takes the device well longer
    than it takes the host: at 4 TB/s and 3 µs a link some 1.5 ms, in at most 256 links.
    """
    if not on_gpu():
        return 1
    wanted = 1.5e-3 / (links * (nbytes / 4e12 + 3e-6))
    return max(1, min(math.ceil(wanted), 256 // links))


def walked[C](walk: Callable[[C], C], carry: C, rounds: int) -> C:
    """``walk`` done ``rounds`` times: a loop on the device, for a longer program takes longer to
    compile and no less time to run.
    """
    return walk(carry) if rounds == 1 else lax.fori_loop(0, rounds, lambda _, c: walk(c), carry)


def links_for(nbytes: int, most: int = 64) -> int:
    """How many different weights of ``nbytes`` a chain takes: two where no GPU is measured."""
    return min(most, max(4, -int(-CHAIN_BYTES // nbytes))) if on_gpu() else 2
