"""Races, looked for once per kernel: between CTAs, and with copies in bulk.

A CTA's threads are one to the interpreter: barriers among them are compute-sanitizer's subject, and
so is the int4 kernel, which the interpreter cannot run.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import kernels
from pallas_kernels.jobs import launch
from pallas_kernels.kernels import float_gemv, history, stream
from pallas_kernels.kernels.attention_inputs import Norms, Slices, Turn, attention_inputs
from pallas_kernels.kernels.causal_conv import causal_conv
from pallas_kernels.kernels.chunk_inside import inside
from pallas_kernels.kernels.chunk_through import Chunks, through
from pallas_kernels.kernels.delta_rule import delta_rule_decode
from pallas_kernels.kernels.middle import Heads, Projected, Small, middle
from pallas_kernels.kernels.residual_norm import residual_norm
from pallas_kernels.place import Place
from tests.support.mosaic import RACES, no_races, races


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def int32(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def run_delta_rule() -> None:
    """Two rows, two value heads a key head, two tiles a head."""
    keys, gates = normal(2, 2, 1, 64), -jnp.abs(normal(2, 2, 2))
    operands = (
        keys,
        keys,
        normal(2, 2, 2, 128),
        gates,
        -gates,
        jnp.float32(1),
        normal(2, 2, 64, 128),
    )
    delta_rule_decode(*operands, tile=64, interpret=RACES)


def run_middle_and_history() -> None:
    """Two value heads share the channels of a key head; the second of three rows is idle."""
    HK, HV, K, V, W = 1, 2, 64, 64, 3
    C = 2 * HK * K + HV * V
    S, hist = jax.new_ref(normal(1, 3, HV, K, V)), jax.new_ref(normal(1, 3, W - 1, C))
    place = Place(int32(0), int32(0, -1, 2), int32(1, -1, 2))
    work = history.job(hist, normal(C, W), place, 3)
    ((pre, newest),) = launch([work], name="history", interpret=RACES)
    z, gate = normal(2, 3, HV * V), normal(1, 3, HV)
    projected = Projected(normal(2, 3, C), z, gate, gate, pre, newest)
    small = Small(normal(HV), normal(HV), normal(V))
    heads = Heads(HK, HV, K, V, 1e-6)
    middle(projected, small, S, hist, place, heads, tile=V, trace=True, interpret=RACES)


def run_causal_conv() -> None:
    """Three runs of tokens, each of which begins with frames of the one before."""
    causal_conv(normal(1, 35, 192), normal(1, 3, 192), normal(192, 4), interpret=RACES)


def run_float_gemv() -> None:
    """Two jobs in a launch: K slices, rows of weights left over, and two blocks of rows of x."""
    x, w = normal(9, 320), normal(21, 320)
    work = [float_gemv.job(x, w, splits=2), float_gemv.job(x, w[:5])]
    launch(work, name="two", interpret=RACES)


def run_stream() -> None:
    stream.sums(jnp.arange(3 * 16 * 9 * 64, dtype=jnp.int32), interpret=RACES)


def run_attention_inputs() -> None:
    """Two queries, a key and a value of three rows, the second of them idle."""
    slices = Slices(normal(2, 3, 512), normal(2, 3, 128), normal(2, 3, 128))
    norms, turn = Norms(normal(128), normal(128)), Turn(normal(3, 32), normal(3, 32))
    cache, place = normal(3, 1, 4, 128), int32(1, -1, 3)
    attention_inputs(slices, norms, turn, place, cache, cache, eps=1e-6, interpret=RACES)


def run_residual_norm() -> None:
    operands = normal(3, 2, 256), normal(2, 256), normal(256)
    residual_norm(*operands, eps=1e-6, size=1, interpret=RACES)


def run_chunks(stages: int = 1) -> None:
    """Three chunks of two sequences, two value heads a key head; one stage is used thrice."""
    q = normal(1, 192, 1, 64).astype(jnp.bfloat16)
    v, gates = normal(1, 192, 2, 64).astype(jnp.bfloat16), normal(3, 2, 5, 64)
    T, P = inside(q, q, gates, jnp.float32(1), interpret=RACES)
    chunks, S = Chunks(q, q, v, T, P, gates), normal(2, 2, 64, 64)
    through(chunks, int32(0, 2, 3), jnp.float32(1), S, stages=stages, interpret=RACES)


RUNS: dict[str, tuple[Callable[[], None], int]] = {
    "delta_rule": (run_delta_rule, 1),
    "middle history": (run_middle_and_history, 2),
    "causal_conv": (run_causal_conv, 1),
    "float_gemv": (run_float_gemv, 1),
    "stream": (run_stream, 1),
    "attention_inputs": (run_attention_inputs, 1),
    "residual_norm": (run_residual_norm, 1),
    "chunk_inside chunk_through": (run_chunks, 2),
}
"""Files of kernels, what runs them, and in how many launches."""


@pytest.mark.parametrize("name", RUNS)
def test_no_race(name: str) -> None:
    run, launches = RUNS[name]
    with no_races(launches):
        run()


def test_every_kernel_that_the_interpreter_can_run_is_among_them() -> None:
    files = {path.stem for path in Path(kernels.__path__[0]).glob("*.py")} - {"__init__"}
    assert {name for names in RUNS for name in names.split()} == files - {"q4_gemv"}


def test_two_ctas_that_write_one_element_are_a_race() -> None:
    """In the first of two launches: JAX remembers the last alone."""

    def body(x, out):
        out[...] = x[...] + lax.axis_index("cta").astype(jnp.float32)

    x = jnp.zeros((128,), jnp.float32)
    with races() as found:
        for ctas in (2, 1):
            plgpu.kernel(body, out_type=x, grid=(ctas,), grid_names=("cta",), interpret=RACES)(x)
    assert found == [True, False]


def test_a_copy_that_is_not_waited_for_is_a_race() -> None:
    def body(x, out, here, arrived):
        plgpu.copy_gmem_to_smem(x, here, arrived)
        pl.when(x[0] > 1)(lambda: plgpu.barrier_wait(arrived))
        out[...] = here[...]

    x = jnp.zeros((128,), jnp.float32)
    scratch = [plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()]
    kernel = plgpu.kernel(body, out_type=x, scratch_types=scratch, interpret=RACES)
    with races() as found:
        kernel(x)
    assert found == [True]
