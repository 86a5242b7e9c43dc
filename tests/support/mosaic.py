"""Private parts of JAX that tests need: races that the interpreter finds, and MLIR."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
from jax._src.interpreters.mlir import make_ir_context
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

VALUES = plgpu.InterpretGPUParams()
"""The interpreter; it fills every buffer with NaN before a kernel runs."""
RACES = plgpu.InterpretGPUParams(detect_races=True)
"""The same, looking for races between CTAs and with copies in bulk: slower."""


@contextmanager
def races() -> Iterator[list[bool]]:
    """Whether each kernel that ran inside with ``RACES`` had a race, in order; filled at the end.

    JAX keeps this of the last kernel alone.
    """
    states: list[Any] = []
    found: list[bool] = []

    def recorded(**options: Any) -> Any:
        states.append(state(**options))
        return states[-1]

    state = GPURaceDetectionState
    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", recorded):
        yield found
        jax.effects_barrier()
    # A kernel that ran without the search has noted no write.
    found += [state.races_found for state in states if state.writes]


@contextmanager
def no_races(kernels: int) -> Iterator[None]:
    """So many kernels ran inside with ``RACES``, and none had a race."""
    with races() as found:
        yield
    assert found == [False] * kernels


def operations(module: Any, *names: str) -> list[Any]:
    """The operations of these names in an MLIR module, in order."""
    found = []

    def look(op: Any) -> ir.WalkResult:
        if op.name in names:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return found


@contextmanager
def kernel_of(call: Any) -> Iterator[Any]:
    """The module of a kernel, from its custom call in StableHLO."""
    config = call.attributes["mhlo.backend_config"]
    with make_ir_context() as context:
        context.allow_unregistered_dialects = True
        yield ir.Module.parse(ir.StringAttr(config["module"]).value_bytes)
