"""A workload, the unit that is timed: how to prepare and check it, and how many bytes it moves."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax.bench.slope import Timing, slope

LIMIT = 5e-6
"""Limit of max_rel to float64: float32 products summed in any order, as in verify's int4 tier."""
CHAIN_BYTES = 1.1e9
"""On a GPU a chain touches this many bytes, so no second-level cache holds them between calls."""

_COPIES = 3
"""How many arrays of NaN are freed for each result of a call."""

Measure = Callable[..., Timing]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A workload whose weights and inputs are on the device, ready to be checked and timed.

    Attributes:
        check: runs the very function that is timed and returns its error, which the workload's
            limit bounds.
        run: queues one chain; takes a carry and returns the next one. The carry is few arrays,
            since an output costs the host more time than a small kernel costs the GPU.
        carry: the first carry; may be donated.
        detail: a few words on what was compared.
    """

    check: Callable[[], float]
    run: Callable[[Any], Any]
    carry: Any
    detail: str = "to float64"
    measured: Callable[[int], Timing] | None = None
    """Where it is not None, it measures instead of ``run``: repetitions -> the time of one link."""
    memory: int | None = None
    """Bytes that the timed program holds at once, for tables that show them; else None."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One row of the table, before it is measured.

    What is timed is a chain of links: equal pieces of work, each on other weights or states. The
    row gives the time, bytes and flops of one link.

    Attributes:
        kernel: the name of what is timed; workloads of one kernel and shape are compared.
        backend: "xla", "pallas" or a peer's name.
        shape: all sizes except the batch, as a word.
        batch: B.
        bytes: the fewest bytes that a link must read and write.
        flops: multiplications and additions of a link.
        links: how many links a chain has.
        make: prepares the workload: puts weights and inputs on the device.
        limit: the largest error that the check allows.
        unit: the unit of the error.
        measure: how the time is measured, :func:`slope` or :func:`blocking`.
        layers: how many layers a link has, where it is a stack; else None.
        tokens: how many tokens a link takes in all its sequences, for tables that show them; else
            None.
        matrix: whether its flops per second are compared with those of a large matrix product.
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
        """The id of its check: ``bench.<kernel>_<backend>.<shape>_b<batch>``."""
        return f"bench.{self.kernel}_{self.backend}.{self.shape}_b{self.batch}"


def on_gpu() -> bool:
    """Whether the default device is a GPU."""
    return jax.default_backend() == "gpu"


def poisoned(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; on a GPU, its results are written over memory that is full of NaN.

    So an element that the function does not write is NaN. A first run, on copies because a function
    may donate, compiles and tells the sizes of the results. Then arrays of these sizes with all
    bits set, which is a NaN in every float type, are made and freed, and the allocator gives their
    memory to the results. Arrays that are updated in place are not affected.
    """
    if on_gpu():
        outputs = jax.block_until_ready(function(*jax.tree.map(jnp.copy, args)))
        sizes = [x.nbytes for x in jax.tree.leaves(outputs)]
        del outputs
        poison(sizes)
    return function(*args)


def peak_bytes(program: jax.stages.Compiled) -> int | None:
    """Bytes of a program's arguments, results and temporaries; None where XLA does not say.

    The device's own peak would not do: it counts all programs since the start of the process.
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
    """How often a call walks the chain, on a GPU, so that a call keeps the device busy for longer
    than the host takes to queue it: about 1.5 ms at 4 TB/s and 3 µs a link, in at most 256 links.
    """
    if not on_gpu():
        return 1
    wanted = 1.5e-3 / (links * (nbytes / 4e12 + 3e-6))
    return max(1, min(math.ceil(wanted), 256 // links))


def walked[C](walk: Callable[[C], C], carry: C, rounds: int) -> C:
    """``walk`` applied ``rounds`` times, in a loop on the device: a longer program would take
    longer to compile and run no faster.
    """
    return walk(carry) if rounds == 1 else lax.fori_loop(0, rounds, lambda _, c: walk(c), carry)


def links_for(nbytes: int, most: int = 64) -> int:
    """How many different weights of ``nbytes`` a chain takes; two where the device is no GPU."""
    return min(most, max(4, -int(-CHAIN_BYTES // nbytes))) if on_gpu() else 2
