"""Whole models in bench: what their rows say, and that a wrong model has no time."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.bench import run as bench
from gdn_jax.bench.slope import Timing
from gdn_jax.bench.suites import model, model_decode, model_prefill
from gdn_jax.bench.suites import model_work as work
from gdn_jax.bench.workload import Workload
from gdn_jax.cli import bench as command
from gdn_jax.config import FULL, LINEAR
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.config import MODEL_PRESETS
from gdn_jax.models.generation import device
from gdn_jax.models.generation.host import LOOK
from gdn_jax.models.synthetic import model_params_like
from tests.bench.test_suites import run

B27 = MODEL_PRESETS["qwen3.5-27b"]
CFG = dataclasses.replace(
    B27,
    gdn=gdn.GDNConfig(64, 1, 2, 32, 64),
    layer_types=(LINEAR, FULL),
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rotary_dim=8,
)
TOKENS = 40
BATCH, POSITION = 9, 20
"""More rows than are distinct, in the room that a prompt of TOKENS has too."""


@pytest.fixture(scope="module", autouse=True)
def bfloat16_weights() -> Iterator[None]:
    """int4 on a CPU takes far longer to compile, and other tests compare its products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "WEIGHTS", "bf16")
        work.made.cache_clear()
        yield
    work.made.cache_clear()
    model_decode.exact.cache_clear()


def decode_row() -> Workload:
    return model_decode.workload(CFG, "xla", BATCH, POSITION)


def prefill_row() -> Workload:
    return model_prefill.workload(CFG, "xla", TOKENS)


def assert_red(workload: Workload) -> None:
    def never(*_: Any, **__: Any) -> Timing:
        raise AssertionError("timed behind a red check")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_prefill, "blocking", never)
        done = bench.check_and_time(dataclasses.replace(workload, measure=never), 10.0, 1)
    assert not done.ok
    assert done.value > 2 * workload.limit
    assert "not timed" in done.detail
    assert (done.us, done.gbps, done.share) == (None, None, None)


def wrong_blocks(params: Any, kind: str, **changes: Any) -> Any:
    """Weights whose mixers of this kind have these changes."""
    blocks = [
        dataclasses.replace(b, mixer=dataclasses.replace(b.mixer, **changes)) if k == kind else b
        for b, k in zip(params.blocks, CFG.layer_types, strict=True)
    ]
    return dataclasses.replace(params, blocks=tuple(blocks))


@pytest.mark.slow
def test_steps_of_a_right_model_are_green_and_start_from_their_position_each_time() -> None:
    starts = []
    decode = device.decode

    def watched(params: Any, rows: device.Rows, *rest: Any) -> Any:
        starts.append(np.asarray(rows.cache.length).tolist())
        return decode(params, rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "decode", watched)
        done = bench.check_and_time(decode_row(), 10.0, 1)
    assert done.ok, done.detail
    assert done.value < model_decode.LIMIT / 10
    assert done.us is not None
    assert starts == [[POSITION] * BATCH] * (1 + 2 + 2 + 14)


@pytest.mark.parametrize("wrong", ["position", "state", "weights", "row", "logprob", "idle"])
def test_wrong_steps_are_red_and_have_no_time(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = device.decode

    def mistaken(params: Any, rows: device.Rows, keep: Any, *rest: Any) -> Any:
        cache = rows.cache
        if wrong == "position":
            cache = dataclasses.replace(cache, length=cache.length + 1)
        elif wrong == "state":
            S = cache.states.S[..., ::-1, :]
            cache = dataclasses.replace(cache, states=dataclasses.replace(cache.states, S=S))
        elif wrong == "weights":
            params = wrong_blocks(params, FULL, v_proj=params.blocks[1].mixer.k_proj)
        elif wrong == "row":
            cache = dataclasses.replace(cache, k=tuple(k.at[-1].set(k[0]) for k in cache.k))
        elif wrong == "idle":
            keep = keep.at[-1].set(False)
        rows, chosen = decode(params, dataclasses.replace(rows, cache=cache), keep, *rest)
        if wrong == "logprob":
            chosen = chosen._replace(logprobs=chosen.logprobs.at[-1, -1].add(0.2))
        return rows, chosen

    monkeypatch.setattr(device, "decode", mistaken)
    assert_red(decode_row())


@pytest.mark.slow
def test_a_prompt_is_checked_and_timed() -> None:
    done = bench.check_and_time(prefill_row(), 10.0, 7)
    assert done.ok, done.detail
    assert done.repetitions == 3
    assert done.us is not None


@pytest.mark.parametrize("wrong", ["weights", "lost", "token"])
def test_a_wrong_prompt_is_red(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, first = device.prefill, device.first

    def mistaken(params: Any, cache: ModelCache, prompts: Any, *rest: Any) -> Any:
        if wrong == "weights":
            params = wrong_blocks(params, LINEAR, in_proj_z=-params.blocks[0].mixer.in_proj_z)
        elif wrong == "lost":
            prompts = [np.append(prompts[0][1:], prompts[0][-1])]
        return prefill(params, cache, prompts, *rest)

    def other(rows: device.Rows, logits: Any, *rest: Any) -> Any:
        return first(rows, -logits if wrong == "token" else logits, *rest)

    monkeypatch.setattr(device, "prefill", mistaken)
    monkeypatch.setattr(device, "first", other)
    assert_red(prefill_row())


def test_error_counts_every_row_up_to_another_likeliest() -> None:
    wanted = jnp.log(jnp.asarray([[[0.6, 0.4], [0.5, 0.5]], [[0.9, 0.1], [0.2, 0.8]]]))
    tokens = jnp.asarray([[0, 1, 0], [0, 1, 0]])
    right = jnp.log(jnp.asarray([[0.6, 0.5, 0.6], [0.9, 0.2, 0.9]]))
    # The second row took the other of two as likely: what it did from there on is another text.
    assert model_decode.error(device.Chosen(tokens, right.at[1, 1].add(9)), wanted) < 1e-6
    later = model_decode.error(device.Chosen(tokens, right.at[1, 2].add(0.25)), wanted)
    assert later == pytest.approx(0.25)
    other = device.Chosen(tokens.at[0, 2].set(1), right.at[0, 2].set(math.log(0.4)))
    assert model_decode.error(other, wanted) == pytest.approx(math.log(0.6 / 0.4))
    assert (
        model_decode.error(device.Chosen(tokens, right.at[0, 0].set(math.nan)), wanted) == math.inf
    )


def test_bytes_and_flops_of_27b(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "WEIGHTS", "q4")
    D, F, V = 5120, 17408, 248320
    large = 48 * (10240 + 6144 + 6144) * D + 16 * (12288 + 2 * 1024 + 6144) * D + 64 * 3 * F * D
    gates = 48 * (2 * 48 * D + 4 * 10240)
    small = gates + 48 * (48 + 48 + 128) + 16 * 2 * 256 + (2 * 64 + 1) * D
    weights = (large + V * D) * 18 // 32 + 4 * small
    assert work.weight_bytes(B27) == weights
    assert 14.4e9 < weights < 14.6e9
    state = 48 * (48 * 128 * 128 + 3 * 10240) * 4
    keys = 16 * 2 * 4 * 256 * 2
    assert work.decode_bytes(B27, 8, 10_000) == weights + 8 * (2 * state + keys * 10_000)
    products, rule = 2 * (large + gates), 48 * 7 * 48 * 128 * 128
    attention = 16 * 2 * 2 * 24 * 256
    each = products + 2 * V * D + rule + attention * 10_000
    assert work.decode_flops(B27, 8, 10_000) == 8 * each
    assert work.prefill_bytes(B27, 8192) == weights + state + keys * 8192
    chunked = work.prefill_flops(B27, 8192) - 8192 * products - 2 * V * D - attention * 8192**2 // 2
    assert chunked == 48 * work.chunk.flops_of(B27.gdn, 8192)
    # The chunked form spends more than the recurrence, but no more than a tenth of the whole.
    assert 8192 * rule < chunked < work.prefill_flops(B27, 8192) / 10


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_those_of_the_arrays(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "WEIGHTS", "q4")
    cfg = dataclasses.replace(CFG, tied=tied)
    params = model_params_like(cfg, jax.random.key(0), "q4", kernel=False)
    unread = 0 if tied else 2 * cfg.vocab_size * cfg.hidden_size
    assert work.weight_bytes(cfg) == params.nbytes - unread
    cache = jax.eval_shape(lambda: ModelCache.zeros(cfg, 3, 7, jnp.bfloat16))
    assert work.state_bytes(cfg, 3) + work.key_bytes(cfg, 3, 7) == cache.nbytes - 4 * 3


def test_rows_are_batches_then_positions_then_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = model.Sizes((100, 10_000), 512)
    found = [*model.rows(B27, [8, 1], ["xla", "pallas"], sizes)]
    per = "l64_v248320"
    ids = [f"decode_xla.{per}_p100_b8", f"decode_xla.{per}_p100_b1", f"decode_xla.{per}_p10000_b1"]
    ids += [f"prefill_xla.{per}_t512_b1"]
    ids += [id_.replace("xla", "pallas") for id_ in ids]
    assert [row.id for row in found] == [f"bench.model_{id_}" for id_ in ids]
    assert [row.tokens for row in found[:4]] == [8, 1, 1, 512]
    assert [row.matrix for row in found[:4]] == [False, False, False, True]
    assert {row.links for row in found if not row.matrix} == {LOOK}
    monkeypatch.setattr(model, "on_gpu", lambda: True)
    found = [*model.rows(B27, [8, 1], ["xla", "pallas"], sizes)]
    assert [row.backend for row in found] == ["pallas"] * 4
    assert {row.backend for row in model.rows(B27, [1], ["xla"], sizes)} == {"xla"}
    large = [*model.workloads(B27.gdn, [1], ["pallas"])]
    assert [row.shape for row in large[2:]] == [f"{per}_p100000", f"{per}_t8192"]


def test_the_command_has_models_by_name_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--suite", "model") == 2
    said = capsys.readouterr().err
    assert said == (
        "gdn-jax: bench: suite model has no model of these layers; "
        "needed --preset qwen3.5-27b or qwen3.5-9b\n"
    )
    asked = []
    monkeypatch.setattr(command, "workloads", lambda cfg, suites, *_: asked.append(suites))
    assert run() == 2
    assert asked == [tuple(name for name in bench.SUITES if name != "model")]


def test_on_a_cpu_the_command_takes_four_layers_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ("--suite", "model", "--backend", "xla", "--batch", "2", "--time-limit", "0")
    assert run("--preset", "qwen3.5-9b", *options, "--json", str(file)) == 0
    left = [line["id"] for line in json.loads(file.read_text())["not_run"]]
    rows = ["decode_xla.l4_v4096_p100_b2", "decode_xla.l4_v4096_p1000_b1"]
    rows += ["prefill_xla.l4_v4096_t128_b1"]
    assert left == [f"bench.model_{row}" for row in rows]
