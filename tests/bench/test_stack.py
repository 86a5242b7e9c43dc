"""The stack in one jit and in a few: what each computes, takes and is called."""

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from gdn_jax.bench.suites import delta_rule, layer
from gdn_jax.bench.workload import Prepared
from gdn_jax.config import PRESETS
from gdn_jax.serving.bank import LayerBank
from tests.support.tools import assert_close

TINY = PRESETS["tiny"]


@pytest.mark.slow
def test_a_stack_of_one_layer_repeated_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first layer is right; only the walk through the layers shows it."""
    step = LayerBank.step

    def stuck(bank: LayerBank, state: Any, index: int, x: Any, **options: Any) -> tuple[Any, Any]:
        y, _ = step(bank, state, bank.resident[0], x, **options)
        _, state = step(bank, state, index, x, **options)
        return y, state

    def made_by(by: int | None) -> Prepared:
        layer._token.cache_clear()
        return layer._make_stack(TINY, "q4", "xla", 9, 3, by)

    whole, divided = made_by(None), made_by(2)
    for found in (whole, divided):
        assert found.check() < 5e-6
    pairs = zip(
        *(jax.tree.leaves(found.run(found.carry)) for found in (whole, divided)), strict=True
    )
    for a, b in pairs:
        assert np.abs(a - b).max() <= 1e-5
    monkeypatch.setattr(LayerBank, "step", stuck)
    for by in (None, 2):
        assert made_by(by).check() == math.inf
    layer._token.cache_clear()


def test_the_stack_is_divided_on_gpu_kernels_in_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "on_gpu", lambda: True)
    rows = list(layer.stack(PRESETS["qwen3.5-27b"], [1, 2, 8], ["xla", "pallas"]))
    divided = [r for r in rows if "_by" in r.shape]
    assert [(r.shape.removeprefix("48xd5120_by"), r.batch) for r in divided] == [
        (by, batch) for batch in (1, 8) for by in ("12", "6", "4")
    ]
    assert {(r.kernel, r.backend, r.measure.__name__) for r in divided} == {
        ("stack_q4_sync", "pallas", "blocking")
    }
    assert len({r.id for r in rows}) == len(rows) == 3 * 2 * 2 * 2 + 6


def test_a_jit_of_a_few_layers_takes_only_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[int]] = []
    walk = layer._walk

    def noted(carry: Any, bank: LayerBank, group: Any, backend: str) -> Any:
        taken.append(list(bank.resident))
        assert tuple(bank.resident) == tuple(group)
        return walk(carry, bank, group, backend)

    monkeypatch.setattr(layer, "_walk", noted)
    layer._token.cache_clear()
    layer._make_stack(TINY, "q4", "xla", 1, 3, 2)
    layer._token.cache_clear()
    assert taken == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("module", "make"), [(delta_rule, delta_rule.workloads), (layer, layer.one_layer)]
)
def test_a_chain_walked_often_is_the_chain_again_and_again(
    monkeypatch: pytest.MonkeyPatch, module: Any, make: Any
) -> None:
    monkeypatch.setattr(module, "rounds_for", lambda *_: 3)
    workload = next(make(TINY, [1], ["xla"]))
    assert workload.links == 6
    made = workload.make()
    # A chain gives away what it is given.
    copies = [jax.tree.map(lambda x: x + 0, made.carry) for _ in range(2)]
    often = made.run(copies[0])
    monkeypatch.setattr(module, "rounds_for", lambda *_: 1)
    once = next(make(TINY, [1], ["xla"])).make().run
    again = functools.reduce(lambda carry, _: once(carry), range(3), copies[1])
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), often, again)
