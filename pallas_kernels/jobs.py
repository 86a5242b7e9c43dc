"""Several independent jobs in one kernel launch, since a launch costs about 2 µs by itself."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Job:
    """``ctas`` independent pieces of work, each done by one CTA of 128 threads.

    ``body(index, *operands, *outs, *scratch)`` does piece ``index``, an int32 scalar, and gets
    references. An operand that is a reference already (``jax.new_ref``) may be written. Scratch
    of one name is the same memory in all jobs of a launch, and has one type.
    """

    ctas: int
    operands: tuple[Any, ...]
    outs: tuple[jax.ShapeDtypeStruct, ...]
    body: Callable[..., None]
    scratch: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def launch(
    jobs: Sequence[Job], *, name: str, after: jax.Array | None = None, interpret: Any = None
) -> list[tuple[jax.Array, ...]]:
    """Run the jobs side by side in one kernel; the outputs of each, in order.

    Args:
        jobs: at least one; their CTAs start in this order.
        name: of the kernel, as a profile shows it.
        after: an array that is not read, so that this launch follows the one that makes it.
        interpret: ``plgpu.InterpretGPUParams`` to compute on a CPU.
    """
    scratch: dict[str, Any] = {}
    for job in jobs:
        for key, spec in job.scratch.items():
            if scratch.setdefault(key, spec) != spec:
                raise ValueError(f"scratch {key!r} has two types: {scratch[key]} and {spec}")
    firsts = list(itertools.accumulate((job.ctas for job in jobs), initial=0))
    extra = () if after is None else (after,)

    def body(*refs: Any) -> None:
        cursor = iter(refs)
        operands = [[next(cursor) for _ in job.operands] for job in jobs]
        for _ in extra:
            next(cursor)
        outs = [[next(cursor) for _ in job.outs] for job in jobs]
        memory = dict(zip(scratch, cursor, strict=True))
        i = lax.axis_index("cta")
        for job, first, ins, results in zip(jobs, firsts, operands, outs, strict=False):
            mine = [memory[key] for key in job.scratch]
            inside = (i >= first) & (i < first + job.ctas)

            def run(job=job, first=first, refs=(*ins, *results, *mine)) -> None:
                job.body(i - first, *refs)

            run() if len(jobs) == 1 else pl.when(inside)(run)

    flat = plgpu.kernel(
        body,
        out_type=[out for job in jobs for out in job.outs],
        grid=(firsts[-1],),
        grid_names=("cta",),
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name=name,
    )(*(x for job in jobs for x in job.operands), *extra)
    cursor = iter(flat)
    return [tuple(next(cursor) for _ in job.outs) for job in jobs]
