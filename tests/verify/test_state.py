"""``gdn-jax verify --suite state``: green as it is, and each check red for a mistake it guards."""

import contextlib
import dataclasses
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gdn_jax as gdn
from gdn_jax.cli.main import main
from gdn_jax.serving import device, drafts
from gdn_jax.serving import rows as slot_rows
from gdn_jax.verify import subject, suites
from gdn_jax.verify.state import sequences, slot_run
from gdn_jax.verify.state.sequences import BATCH_LIMIT, CHECKS

IDS = {f"state.{name}" for name in CHECKS}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.slow
def test_it_is_green_and_reported(tmp_path: Path) -> None:
    file, page = tmp_path / "r.json", tmp_path / "r.html"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        files = ["--json", str(file), "--html", str(page)]
        assert run("--suite", "state", "--preset", "tiny", *files) == 0
    result = json.loads(file.read_text())
    assert result["settings"]["suite"] == "state"
    assert len(IDS) == 11
    assert {check["id"] for check in result["checks"]} == IDS
    for check in result["checks"]:
        assert check["limit"] == (BATCH_LIMIT if check["id"] == "state.batch" else 0)
        assert check["value"] <= check["limit"]
        assert check["id"] in page.read_text()
        assert check["id"] in printed.getvalue()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--preset", "tiny"], ["f32", "q4"]),
        (
            ["--preset", "tiny", "--suite", "all", "--tier", "f32"],
            ["f32", "state", "prefill", "model"],
        ),
        (["--preset", "qwen3.5-9b", "--suite", "state"], ["state"]),
        (["--preset", "qwen3.5-9b", "--suite", "prefill"], ["prefill"]),
    ],
)
def test_each_suite_runs_its_parts_and_only_the_layer_needs_an_oracle(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(subject, "draw_weights", lambda cfg, seed: {})
    for suite in suites.SUITES.values():
        for name, part in suite.parts.items():
            noted = part._replace(run=lambda *_, name=name, **__: seen.append(name))
            monkeypatch.setitem(suite.parts, name, noted)
    monkeypatch.setattr(suites.bundled, "run", lambda *_, **__: seen.append("model"))
    run(*arguments)
    assert seen == expected


def test_options_of_the_layer_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--suite", "state", "--oracle-python", "python") == 2
    assert "--suite state has no use for --oracle-python" in capsys.readouterr().err


Honest = Callable[..., Any]


def seen_through_a_sum(honest: Honest) -> Honest:
    def planted(states, layer, slots):
        rows = honest(states, layer, slots)
        return jax.tree.map(lambda row, x: row + 0 * x[layer].sum(), rows, states)

    return planted


def times_zero(_: Honest) -> Honest:
    return lambda state, slots: jax.tree.map(lambda x: x.at[:, slots].multiply(0), state)


def one_fewer(honest: Honest) -> Honest:
    return lambda record, state, accepted: honest(record, state, jnp.maximum(accepted - 1, 0))


def clamped(honest: Honest) -> Honest:
    def planted(record, hist, node):
        return honest(record, hist, jnp.minimum(node, hist.shape[1] - 1))

    return planted


def all_by_the_first(honest: Honest) -> Honest:
    def planted(record, state, accepted):
        return honest(record, state, jnp.minimum(accepted, record.lengths[0]))

    return planted


def into_slot_0(honest: Honest) -> Honest:
    return lambda states, layer, slots, rows: honest(states, layer, jnp.maximum(slots, 0), rows)


def left_out(_: Honest) -> Honest:
    return lambda y, slots: y


def forgotten(_: Honest) -> Honest:
    return lambda record, hist, node: hist


def chosen_by_a_product(_: Honest) -> Honest:
    def planted(S, start, node):
        nodes = jnp.concatenate([start[None], S])
        mask = jax.nn.one_hot(node + 1, len(nodes), axis=0)
        return (nodes * mask[..., None, None, None]).sum(0)

    return planted


def last_bit_dropped(honest: Honest) -> Honest:
    def planted(path, cfg):
        pool = honest(path, cfg)
        bits = jax.lax.bitcast_convert_type(pool.S, jnp.uint32) & jnp.uint32(0xFFFFFFFE)
        return dataclasses.replace(pool, S=jax.lax.bitcast_convert_type(bits, jnp.float32))

    return planted


def in_reverse(honest: Honest) -> Honest:
    return lambda pool, slots, *rest, **options: honest(pool, slots[::-1], *rest, **options)


def written_where_read(honest: Honest) -> Honest:
    def planted(self, pool, layer, x, slots, *, write_slots=None, backend=None):
        return honest(self, pool, layer, x, slots, backend=backend)

    return planted


def other_sums(honest: Honest) -> Honest:
    return lambda y, slots: honest(y, slots) * (1 + 1e-5 * (len(y) > 1))


def next_layer(honest: Honest) -> Honest:
    def planted(states, layer, *rest):
        return honest(states, (layer + 1) % len(states.S), *rest)

    return planted


STEP = ("_step", gdn.LayerBank, "step_slots", ["layer", "backend"])
DRAFT = ("_draft", gdn.LayerBank, "draft_slots", ["layer", "scheme", "backend"])
COMMIT = ("_commit", gdn.StatePool, "commit", [])
"""Programs that verify compiles once; a planted mistake needs those anew that it is in."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where", "plant", "programs"),
    [
        ("isolation", [(slot_rows, "read_rows")], seen_through_a_sum, [STEP]),
        ("isolation", [(slot_rows, "read_rows")], seen_through_a_sum, [COMMIT]),
        ("recycle", [(device.JITTED, (device.reset_slots, False))], times_zero, []),
        ("fork_commit", [(slot_rows, "committed")], one_fewer, [COMMIT]),
        ("ragged", [(drafts, "_history")], clamped, [COMMIT]),
        ("ragged", [(slot_rows, "committed")], all_by_the_first, [COMMIT]),
        ("idle", [(slot_rows, "write_rows")], into_slot_0, [STEP]),
        ("idle", [(slot_rows, "write_rows")], into_slot_0, [COMMIT]),
        ("idle", [(slot_rows, "blank_idle")], left_out, [STEP]),
        ("one_token", [(drafts, "_history")], forgotten, [COMMIT]),
        ("rejected", [(drafts, "_kept")], chosen_by_a_product, [COMMIT]),
        ("export_import", [(sequences, "load_pool")], last_bit_dropped, []),
        ("export_import", [(gdn.StatePool, "import_")], in_reverse, []),
        ("prefix", [(gdn.LayerBank, "step_slots")], written_where_read, [STEP]),
        ("batch", [(slot_rows, "blank_idle")], other_sums, [STEP]),
        ("stack", [(slot_rows, "read_rows"), (slot_rows, "write_rows")], next_layer, [STEP]),
        ("stack", [(slot_rows, "read_rows"), (slot_rows, "write_rows")], next_layer, [COMMIT]),
    ],
)
def test_a_mistake_turns_its_check_red(
    name: str,
    where: list[tuple[Any, Any]],
    plant: Callable[[Honest], Honest],
    programs: list[tuple[str, type, str, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, key in where:
        if isinstance(owner, dict):
            monkeypatch.setitem(owner, key, plant(owner[key]))
        else:
            monkeypatch.setattr(owner, key, plant(getattr(owner, key)))
    for program, owner, method, static in programs:
        afresh = jax.jit(functools.partial(getattr(owner, method)), static_argnames=static)
        monkeypatch.setattr(slot_run, program, afresh)
    value, _ = CHECKS[name](small())
    assert value > (BATCH_LIMIT if name == "batch" else 0)


@pytest.mark.slow
def test_drafts_are_serial_decoding_for_other_heads_too() -> None:
    """Three value heads a key head and K < V: XLA fuses the replayed rule in other ways."""
    assert CHECKS["fork_commit"](small("tiny-wide"))[0] == 0


@functools.cache
def small(preset: str = "tiny") -> slot_run.SlotRun:
    return slot_run.SlotRun.of(subject.from_preset(preset, 1, "none"), 4, None)
