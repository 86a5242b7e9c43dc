"""``verify --suite prefill``: green as it is, and each check red for a mistake it guards."""

import contextlib
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gdn_jax.cli.main import main
from gdn_jax.layer import compose, steps
from gdn_jax.ops import chunk, chunk_xla, gates, operands, recurrence
from gdn_jax.verify import subject
from gdn_jax.verify.prefill import checks, rule
from gdn_jax.verify.prefill import run as prefill_run
from gdn_jax.verify.prefill.checks import CHECKS
from gdn_jax.verify.prefill.run import LIMIT, NARROW_LIMIT

IDS = {f"prefill.{name}" for name in CHECKS}


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter cases; the command itself takes all of them."""
    monkeypatch.setattr(rule, "LENGTHS", (1, 65))
    monkeypatch.setattr(rule, "MIDDLE", 65)
    monkeypatch.setattr(rule, "LONG", 1024)
    monkeypatch.setattr(rule, "CHUNK_SIZES", (16, 64))
    monkeypatch.setattr(checks, "CUTS", (1,))
    monkeypatch.setattr(checks, "SPLIT", 4)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--suite", "prefill", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.slow
@pytest.mark.usefixtures("shorter")
def test_it_is_green_and_reported(tmp_path: Path) -> None:
    file, page = tmp_path / "r.json", tmp_path / "r.html"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run("--preset", "tiny", "--json", str(file), "--html", str(page)) == 0
    result = json.loads(file.read_text())
    assert result["settings"]["suite"] == "prefill"
    assert "70 tokens" in result["settings"]["transformers"]
    assert len(IDS) == 10
    assert {check["id"] for check in result["checks"]} == IDS
    for check in result["checks"]:
        own = [row for row in result["prefill"] if row["check"] == check["id"]]
        values = [row[part] for row in own for part in prefill_run.PARTS]
        assert check["value"] == max(value for value in values if value is not None)
        narrow = check["id"] == "prefill.bfloat16"
        assert check["limit"] == (NARROW_LIMIT if narrow else LIMIT)
        assert 0 < check["value"] <= check["limit"]
        assert all(row["ok"] for row in own)
        assert check["id"] in page.read_text()
        assert check["id"] in printed.getvalue()
    cases = [row["case"] for row in result["prefill"]]
    assert {"T = 65", "0 tokens", "1 + 3", "0 of 65", "64 of 65"} <= set(cases)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--preset", "qwen3.5-9b"], "no oracle ships for preset qwen3.5-9b"),
        (["--preset", "tiny", "--seed", "3"], "no oracle ships for preset tiny and seed 3"),
        (["--preset", "tiny", "--oracle", "none"], "--oracle none"),
    ],
)
def test_without_an_oracle_one_check_is_left_out(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = subject.from_preset("tiny", 1, "none").weights
    monkeypatch.setattr(subject, "draw_weights", lambda cfg, seed: small)
    few = {name: CHECKS[name] for name in ("transformers", "lengths")}
    monkeypatch.setattr(checks, "CHECKS", few)
    monkeypatch.setattr(rule, "LENGTHS", (1,))
    file = tmp_path / "r.json"
    assert run(*arguments, "--json", str(file)) == 0
    result = json.loads(file.read_text())
    assert result["settings"]["transformers"] == f"not compared: {reason}"
    assert [check["id"] for check in result["checks"]] == ["prefill.lengths"]


@pytest.mark.parametrize("option", [("--tier", "q4"), ("--tokens", "9")])
def test_options_of_the_layer_are_refused(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*option) == 2
    assert f"--suite prefill has no use for {option[0]}" in capsys.readouterr().err


Honest = Callable[..., Any]


def blank_diagonal(honest: Honest) -> Honest:
    def planted(g):
        M = honest(g)
        return M - jnp.broadcast_to(jnp.eye(g.shape[-1]), M.shape)

    return planted


def differences_of_long_sums(_: Honest) -> Honest:
    def planted(g):
        total, seen = jnp.cumsum(g, axis=-1), jnp.tril(jnp.ones((g.shape[-1],) * 2, bool))
        return jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))

    return planted


def quotients_of_decays(_: Honest) -> Honest:
    def planted(g):
        total = jnp.cumsum(g, axis=-1)
        return jnp.tril(jnp.exp(total)[..., :, None] * jnp.exp(-total)[..., None, :])

    return planted


def inverse_by_doubling_in_bfloat16(_: Honest) -> Honest:
    def planted(A, right, **_):
        def product(a, b):
            a, b = (x.astype(jnp.bfloat16) for x in (a, b))
            return jnp.matmul(a, b, preferred_element_type=jnp.float32)

        power, solved = -A, right
        for _ in range(A.shape[-1].bit_length() - 1):
            solved, power = solved + product(power, solved), product(power, power)
        return solved

    return planted


def twice(honest: Honest) -> Honest:
    return lambda scale, K: honest(scale, K) ** 2


def next_boundary(honest: Honest) -> Honest:
    return lambda cu, *sizes: honest(cu.at[1:3].add(1), *sizes)


def carried_into_the_next(honest: Honest) -> Honest:
    def planted(starts, parts, packed):
        never = jnp.zeros_like(packed.first).at[0].set(packed.first[0])
        return honest(starts, parts, packed._replace(first=never))

    return planted


def taken_from_the_padded_end(honest: Honest) -> Honest:
    """Zeros for the padding, zero outputs and the right history, but a state that goes on."""

    def planted(params, state, xs, cfg, *, lengths=None, **options):
        ys, after = honest(params, state, xs, cfg, lengths=lengths, **options)
        if lengths is not None:
            valid = jnp.arange(xs.shape[1])[None] < lengths[:, None]
            xs = jnp.where(valid[..., None], xs, 0)
            S = honest(params, state, xs, cfg, **options)[1].S
            after = dataclasses.replace(after, S=S)
        return ys, after

    return planted


def padding_not_masked(honest: Honest) -> Honest:
    return lambda *args, lengths=None, **options: honest(*args, **options)


def history_clamped(honest: Honest) -> Honest:
    """A history of the new tokens alone, W-1 of them at least."""

    def planted(qkv, hist, weight, lengths):
        if lengths is not None:
            lengths = jnp.maximum(lengths, hist.shape[1])
            return honest(qkv, hist, weight, lengths)
        out, _ = honest(qkv, hist, weight, lengths)
        return out, jnp.concatenate([0 * hist, qkv], axis=1)[:, -hist.shape[1] :]

    return planted


def tiled_heads(honest: Honest) -> Honest:
    def planted(q, k, v, *gates, **options):
        groups = v.shape[2] // k.shape[2]
        q, k = (jnp.concatenate([x] * groups, axis=2) for x in (q, k))
        return honest(q, k, v, *gates, **options)

    return planted


def rounded_between_chunks(honest: Honest) -> Honest:
    return lambda S, part: honest(S.astype(jnp.bfloat16).astype(jnp.float32), part)


def wrong_in_one_size(honest: Honest) -> Honest:
    def planted(q, k, v, g, beta, S, C, packed):
        return honest(q, k, v, g, beta, S if C != 16 else S * (1 + 1e-4), C, packed)

    return planted


def exponential_first(_: Honest) -> Honest:
    return lambda x: jnp.log1p(jnp.exp(x))


def epsilon_outside(_: Honest) -> Honest:
    return lambda x: x / (jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)) + recurrence.QK_NORM_EPS)


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """A function that was traced is not looked into again, nor may a planted one be found later."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("shorter", "traced_anew")
@pytest.mark.parametrize(
    ("name", "owner", "key", "plant"),
    [
        ("float64", compose, "chunk_rule", tiled_heads),
        ("transformers", compose, "chunk_rule", tiled_heads),
        ("lengths", chunk_xla, "_decays", blank_diagonal),
        ("lengths", chunk, "factor", twice),
        ("split", steps, "causal_conv_tokens", history_clamped),
        ("packed", chunk_xla.Packed, "of", next_boundary),
        ("packed", chunk_xla, "_through_packed", carried_into_the_next),
        ("padding", prefill_run, "_prefill", padding_not_masked),
        ("padding", prefill_run, "_prefill", taken_from_the_padded_end),
        ("padding", steps, "causal_conv_tokens", history_clamped),
        ("chunk_size", chunk, "chunked", wrong_in_one_size),
        ("drift8192", chunk_xla, "_through", rounded_between_chunks),
        ("bfloat16", chunk, "factor", twice),
    ],
)
def test_a_mistake_turns_its_check_red(
    name: str,
    owner: Any,
    key: str,
    plant: Callable[[Honest], Honest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, key, plant(getattr(owner, key)))
    rows, _ = CHECKS[name](small())
    assert prefill_run.verdict(rows)[0] > rows[0]["limit"]


@pytest.mark.slow
@pytest.mark.usefixtures("shorter", "traced_anew")
@pytest.mark.parametrize(
    ("case", "owner", "key", "plant"),
    [
        ("g = -5000 once", chunk_xla, "_decays", differences_of_long_sums),
        ("decay 1e-12 a token", chunk_xla, "_decays", quotients_of_decays),
        ("one key, beta 0.835", lax.linalg, "triangular_solve", inverse_by_doubling_in_bfloat16),
        ("q and k of length 1e-3", operands, "l2_normalise", epsilon_outside),
        ("a + dt_bias near 95, a layer", gates, "softplus", exponential_first),
    ],
)
def test_a_hard_input_finds_its_mistake(
    case: str,
    owner: Any,
    key: str,
    plant: Callable[[Honest], Honest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {name: drawn for name, drawn in rule.hard_cases().items() if name == case}
    monkeypatch.setattr(rule, "hard_cases", lambda: known)
    monkeypatch.setattr(rule, "CHUNK_SIZES", (64,))
    if known:
        monkeypatch.setattr(rule, "gate_far_above_softplus", lambda this: [])
    monkeypatch.setattr(owner, key, plant(getattr(owner, key)))
    rows, _ = CHECKS["adversarial"](small())
    assert [row["case"] for row in rows] == [case]
    assert prefill_run.verdict(rows)[0] > LIMIT


@functools.cache
def small() -> prefill_run.LayerRun:
    it = subject.from_preset("tiny", 1, "shipped")
    return prefill_run.LayerRun.of(it.cfg, it.weights, None, it.oracle)
