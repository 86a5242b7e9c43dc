"""The peers of the chunked rule: checked like our own rows, and listed where they fail."""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gdn_jax.bench import run as bench
from gdn_jax.bench.peers import chunk_rows
from gdn_jax.bench.peers.peer import PEERS, Peer, ask
from gdn_jax.bench.suites import chunk
from gdn_jax.bench.workload import Workload
from gdn_jax.errors import BackendUnavailableError
from tests.bench.test_prefill import CASE, TINY, T, assert_red, stale_state


def jla_row(monkeypatch: pytest.MonkeyPatch, operator: Callable[..., Any]) -> Workload:
    """The row of a jax-linear-attention that computes this."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    names = ("jla", "jla.ops", "jla.ops.mosaic_gpu", "jla.ops.mosaic_gpu.gated_delta_rule")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "gated_delta_rule", operator, raising=False)
    return next(chunk_rows.workloads(TINY, [T]))


def test_jla_is_checked_on_repeated_heads_and_its_faults_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def right(q: Any, k: Any, v: Any, *gates: Any, **options: Any) -> Any:
        seen.append((q.shape, options.pop("output_final_state")))
        return chunk.chunk_gated_delta_rule(q, k, v, *gates, backend="xla", **options)

    made = jla_row(monkeypatch, right)
    prepared = made.make()
    assert prepared.check() <= made.limit
    assert seen == [((1, T, 4, 16), True)]
    assert "jax-linear-attention of unknown version, to float64" in prepared.detail
    assert_red(
        jla_row(monkeypatch, lambda *x, **options: stale_state(*x, options["initial_state"]))
    )

    def refuses(*_: Any, **__: Any) -> Any:
        raise ValueError("no such card\nmore")

    with pytest.raises(BackendUnavailableError, match=r"^jla: ValueError: no such card$"):
        jla_row(monkeypatch, refuses).make()


def fla_row(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> Workload:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(chunk_rows, "ask", answer)
    chunk_rows._answers.cache_clear()
    return [*chunk_rows.workloads(TINY, [T])][-1]


def test_fla_is_checked_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    o, S = (np.asarray(x) for x in chunk.exact(CASE))
    told = {f"o{T}": o[0], f"S{T}": S, f"seconds{T}": np.array([1.0, 2.0, 3.0])}
    told |= {f"how{T}": np.array("as a CUDA graph"), f"held{T}": np.array(5)}

    def answer(script: str, request: dict[str, np.ndarray], timeout: float) -> Any:
        assert script == "fla_chunk"
        assert request["q"].dtype == np.int16
        assert request["g"].shape == (T, 4)
        return told

    made = fla_row(monkeypatch, answer)
    done = bench.check_and_time(made, None, 1)
    assert (done.ok, done.value, done.us, done.peak_bytes) == (True, 0, 2e6, 5)
    assert "flash-linear-attention of unknown version as a CUDA graph, to float64" in done.detail
    told[f"o{T}"] = np.roll(o[0], 1, axis=0)
    assert_red(made)
    told[f"o{T}"], told[f"S{T}"] = o[0], 1.1 * S
    assert_red(made)
    told[f"failed{T}"] = np.array("OutOfMemoryError: none left")
    with pytest.raises(BackendUnavailableError, match=r"^fla: OutOfMemoryError: none left$"):
        made.make()


def test_fla_that_fails_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fails(*request: Any) -> Any:
        asked.append(request)
        raise BackendUnavailableError("torch finds no CUDA GPU")

    made = fla_row(monkeypatch, fails)
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match=r"^fla: torch finds no CUDA GPU$"):
            made.make()
    assert len(asked) == 1
    ends = chunk_rows._ends(4096)
    assert (len(ends), ends[511], ends[512]) == (1024, 511, 4096 - 512)


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_not_installed_says_what_it_lacks(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=rf"^no .*\b{peer.modules[-1]} here$"):
        peer.require()


def test_a_process_that_fails_says_its_last_line() -> None:
    with pytest.raises(BackendUnavailableError, match=r"No module named .*no_such_script"):
        ask("no_such_script", {"x": np.zeros(1)}, 60)
