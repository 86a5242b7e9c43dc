"""The rows of many sequences: what is timed, and that a slot treated wrongly hides its time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gdn_jax.bench import run as bench
from gdn_jax.bench import workload
from gdn_jax.bench.pools import Contents
from gdn_jax.bench.rows import TimedCheck, row
from gdn_jax.bench.slope import Timing
from gdn_jax.bench.suites import branches, layer, slots
from gdn_jax.bench.workload import Workload
from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.serving.bank import LayerBank
from gdn_jax.serving.pool import StatePool
from tests.support.tools import pretend_device

TINY = PRESETS["tiny"]
CUDA = GDNConfig(128, 1, 2, 64, 128)
BRANCHES = ("draft_snapshot", "draft_replay", "commit_snapshot", "commit_replay", "fork")


def forget() -> None:
    """What was traced before is traced again."""
    jitted: list[Any] = [slots._step, slots._steps, branches._draft, branches._drafts]
    for function in [*jitted, branches._commits, branches._forks]:
        function.clear_cache()


@pytest.fixture
def forgets() -> Any:
    """Programs traced with a mistake in them are not kept."""
    forget()
    yield
    forget()


def step_row() -> Workload:
    return next(slots.workloads(TINY, [2], ["xla"]))


def branch_rows(*kernels: str) -> list[Workload]:
    return [s for s in branches.workloads(TINY, [2], ["xla"]) if s.kernel in kernels]


def assert_red(workloads: list[Workload]) -> None:
    assert workloads
    for one in workloads:
        done = bench.check_and_time(one, 10.0, 1)
        assert done.detail.endswith("not timed"), "an error is not what is looked for"
        found = row(one, done)
        assert found["ok"] is False, one.id
        assert found["us"] is None
        assert found["tokens_a_second"] is None


def spoil(pool: StatePool, layer: int, slots: jax.Array) -> StatePool:
    """One element of these slots moved by one unit in the last place."""
    S = pool.S.at[layer, slots, -1, -1, -1].set(jnp.nextafter(pool.S[layer, slots, -1, -1, -1], 9))
    return dataclasses.replace(pool, S=S)


def idle_slot(pool: StatePool, rows: jax.Array) -> jax.Array:
    return jnp.argmin(jnp.zeros(pool.num_slots, bool).at[rows].set(True))


step_slots, draft_slots = LayerBank.step_slots, LayerBank.draft_slots
copy, commit = StatePool.copy, StatePool.commit


def step_into_the_next_row(bank: Any, pool: Any, layer: int, x: Any, rows: Any, **to: Any) -> Any:
    return step_slots(bank, pool, layer, x, rows, write_slots=jnp.roll(rows, 1), **to)


def step_beside(bank: Any, pool: Any, layer: int, x: Any, rows: Any, **to: Any) -> Any:
    y, pool = step_slots(bank, pool, layer, x, rows, **to)
    return y, spoil(pool, layer, idle_slot(pool, rows))


def step_of_another_layer(bank: Any, pool: Any, layer: int, x: Any, rows: Any, **to: Any) -> Any:
    return step_slots(bank, pool, 1 - layer, x, rows, **to)


def step_without_last_row(bank: Any, pool: Any, layer: int, x: Any, rows: Any, **to: Any) -> Any:
    return step_slots(bank, pool, layer, x, rows.at[-1].set(-1), **to)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [step_into_the_next_row, step_beside, step_of_another_layer, step_without_last_row],
)
def test_a_wrong_step_is_red(
    wrong: Callable[..., Any], forgets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerBank, "step_slots", wrong)
    assert_red([step_row()])


def one_token_less(pool: Any, records: Any, rows: Any, accepted: Any) -> Any:
    return commit(pool, records, rows, accepted - 1)


def commit_beside(pool: Any, records: Any, rows: Any, accepted: Any) -> Any:
    # Of two rows a link and two links, two of the six slots are never committed to.
    held = Contents.draw(TINY, 1, 6, 2, 2)
    return spoil(
        commit(pool, records, rows, accepted), 0, idle_slot(pool, jnp.asarray(held.rows.ravel()))
    )


def commit_in_the_next_row(pool: Any, records: Any, rows: Any, accepted: Any) -> Any:
    return commit(pool, records, jnp.roll(rows, 1), accepted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "kernels"),
    [
        (one_token_less, ["commit_snapshot", "commit_replay"]),
        (commit_beside, ["commit_snapshot"]),
        (commit_in_the_next_row, ["commit_replay"]),
    ],
)
def test_a_wrong_commit_is_red(
    wrong: Callable[..., Any],
    kernels: list[str],
    forgets: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StatePool, "commit", wrong)
    assert_red(branch_rows(*kernels))


@pytest.mark.slow
def test_a_wrong_fork_is_red(forgets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "copy", lambda pool, src, dst: copy(pool, dst[:1], dst))
    assert_red(branch_rows("fork"))
    forget()
    monkeypatch.setattr(StatePool, "copy", lambda pool, src, dst: copy(pool, src, dst[1:]))
    assert_red(branch_rows("fork"))


@pytest.mark.slow
def test_a_draft_that_keeps_the_wrong_thing_is_red(
    forgets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(*operands: Any, **options: Any) -> Any:
        ys, record = draft_slots(*operands, **options)
        S = record.S if record.S is None else record.S[::-1]
        used = record.operands and (*record.operands[:-1], record.operands[-1] * 0.999)
        return ys, dataclasses.replace(record, S=S, operands=used)

    monkeypatch.setattr(LayerBank, "draft_slots", swapped)
    assert_red(branch_rows(*BRANCHES[:4]))


def test_bytes_of_27b() -> None:
    cfg = PRESETS["qwen3.5-27b"]
    state, history = branches.state_bytes(cfg)
    assert (state, history) == (4 * 48 * 128 * 128, 4 * 3 * 10240)
    found = {(s.kernel, s.batch): s.bytes for s in branches.workloads(cfg, [1, 8], ["xla"])}
    assert found["fork", 8] == 9 * (state + history)
    assert found["commit_snapshot", 8] == 16 * (state + history)
    kept = branches.record_bytes(cfg, "snapshot") / branches.record_bytes(cfg, "replay")
    assert kept == pytest.approx(77, abs=1)
    more = found["draft_snapshot", 1] - found["draft_replay", 1]
    assert more == 4 * state - branches.record_bytes(cfg, "replay")


def test_rows_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (slots, workload):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    cfg, batches = PRESETS["qwen3.5-27b"], [1, 8, 256]
    rows = list(slots.workloads(cfg, batches, ["xla", "pallas"]))
    assert len({s.id for s in rows}) == len(rows)
    steps = [(s.shape, s.batch) for s in rows if s.kernel == slots.STEP and s.backend == "pallas"]
    assert steps == [("d5120_n512", b) for b in batches] + [
        (f"d5120_{pool}", 1) for pool in ("n8", "n64", "n512_t1000")
    ]
    others = {(s.kernel, s.backend, s.batch) for s in rows if s.kernel != slots.STEP}
    drafts = {(k, p, b) for k in BRANCHES[:2] for p in ("xla", "pallas") for b in (1, 8)}
    assert others == drafts | {(k, "xla", b) for k in BRANCHES[2:] for b in (1, 8)}


def timed(batch: int, us: float, shape: str = "d5120_n128") -> dict[str, Any]:
    moved = layer.sizes(PRESETS["qwen3.5-27b"], "q4", batch)[1]
    plain = Workload(slots.STEP, "pallas", shape, batch, moved, 1, 1, lambda: pytest.fail("made"))
    time = Timing(us * 1e-6, us * 1e-6, us * 1e-6, 7)
    return row(plain, TimedCheck.of(plain, 0.0 if us else 1.0, "", time))


@pytest.mark.parametrize(("us", "ok"), [(46.0, True), (48.0, False)])
def test_eight_rows_may_cost_their_states(us: float, ok: bool) -> None:
    """Seven more states are 46 MB, 12.5 µs at 3681 GB/s: 1.35 x 26 and those are 47.6 µs."""
    (found,) = slots.batch8([timed(1, 26.0, "d5120_n8"), timed(8, us), timed(1, 26.0)], 3681.0)
    assert found.ok is ok
    assert found.value == pytest.approx((us - 12.5) / 26, abs=2e-3)


def test_eight_rows_are_not_judged_without_both_times() -> None:
    assert slots.batch8([timed(1, 26.0)], 3681.0) == []
    assert slots.batch8([timed(1, 0.0), timed(8, 40.0)], 3681.0) == []
    assert slots.batch8([timed(1, 26.0, "d5120_n8"), timed(8, 40.0)], 3681.0) == []
    assert slots.batch8([timed(1, 26.0), timed(8, 40.0)], None) == []


@pytest.mark.slow
def test_chains_lower_for_cuda_and_copy_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch)
    bank = layer.made_bank(CUDA, "q4", "pallas", 2)
    contents = Contents.draw(CUDA, 2, 8, 1)
    pool, rows, x = contents.pool(), jnp.asarray(contents.rows[0]), jnp.zeros((1, CUDA.d_model))
    traced = (
        slots._steps.trace((pool, x, x + 1.0), bank, rows, 3, "pallas"),
        slots._aged.trace(pool, bank, x, rows, 5, "pallas"),
        branches._drafts.trace(x[:, None], bank, pool, rows, 1, "replay", "pallas"),
    )
    texts = [one.lower(lowering_platforms=("cuda",)).as_text() for one in traced]
    # Nobody asks for the outputs of old tokens, which leaves two of a layer's three kernels.
    assert [text.count("@mosaic_gpu_v2") for text in texts] == [3, 2, 3]
    whole = f"tensor<{'x'.join(map(str, pool.S.shape))}xf32>"
    copying = ("slice", "scatter", "gather", "concatenate")
    for text in texts[:2]:
        lines = [line.split("custom_call")[0] for line in text.splitlines() if whole in line]
        assert lines
        assert not any(word in line for line in lines for word in copying)
