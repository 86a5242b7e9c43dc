"""The streaming kernel beside the int4 products, and results written where a NaN lay."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import gdn_jax.bench.workload as workloads
from gdn_jax._core.backend import Choice
from gdn_jax.bench import kernels
from gdn_jax.bench.rows import TimedCheck, ratios, row
from gdn_jax.bench.slope import Timing
from gdn_jax.bench.suites import products
from gdn_jax.bench.workload import Workload
from gdn_jax.config import GDNConfig
from gdn_jax.report.record import Row
from pallas_kernels.kernels import stream


def test_int4_is_compared_with_reading_alone() -> None:
    def line(kernel: str, batch: int, seconds: float) -> Row:
        one = Workload(kernel, "pallas", "4x8", batch, 6000, 12000, 2, lambda: pytest.fail("made"))
        return row(one, TimedCheck.of(one, 0.0, "", Timing(seconds, seconds, seconds, 1)))

    rows = [line("stream", 1, 9e-6), line("int4", 1, 1e-5), line("int4", 8, 8e-5)]
    found = {r["id"]: r["ratio"] for r in ratios([*rows, line("float32", 1, 1e-5)])}
    expected = {"bench.int4_pallas.4x8_b1": 0.9, "bench.int4_pallas.4x8_b8": 0.1125}
    assert found == pytest.approx(expected)


def test_the_streaming_kernel_passes_its_check_and_one_that_misses_a_word_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reads(blocks: jax.Array, after: jax.Array) -> jax.Array:
        return stream.sums(blocks, after=after, interpret=plgpu.InterpretGPUParams())

    monkeypatch.setattr(products, "choose", lambda *_, **__: Choice("pallas"))
    cfg = GDNConfig(128, 1, 1, 64, 64)
    for read, wrong in (
        (lambda x, w: reads(w.blocks, x), 0),
        (lambda x, w: reads(w.blocks.at[0, 0, 0, 0].set(1), x), 2),
    ):
        monkeypatch.setattr(kernels, "read_words", read)
        reading, *_ = products.int4(cfg, [1], ["pallas"])
        assert reading.id == "bench.stream_pallas.256x128_b1"
        assert reading.bytes == 256 * 128 * 9 // 16
        assert reading.make().check() == wrong


def test_results_are_written_where_a_nan_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    made_arrays: list[jax.Array] = []
    plain = jnp.full

    def full(*arguments: Any) -> jax.Array:
        made_arrays.append(plain(*arguments))
        return made_arrays[-1]

    @functools.partial(jax.jit, donate_argnums=0)
    def both(carry: Any, x: Any) -> Any:
        return carry + x, jnp.stack([x, x]).astype(jnp.bfloat16)

    monkeypatch.setattr(workloads, "on_gpu", lambda: True)
    monkeypatch.setattr(workloads.jnp, "full", full)
    carry, x = jnp.ones(5), jnp.arange(5.0)
    total, pair = workloads.poisoned(both, carry, x)
    assert np.array_equal(total, np.arange(5) + 1)
    assert np.array_equal(x, np.arange(5))
    assert pair.shape == (2, 5)
    assert carry.is_deleted()
    assert sorted(array.nbytes for array in made_arrays) == [20] * 6
    assert all(array.is_deleted() for array in made_arrays)
    assert np.isnan(plain(4, 255, jnp.uint8).view(jnp.float32)).all()
