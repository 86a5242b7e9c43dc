"""Generation: ragged rows, stops, interruption, room, and what a caller does wrong."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.generation import device, host
from gdn_jax.models.generation.sampling import Sampling
from gdn_jax.models.loading import memory
from gdn_jax.models.model import Model, load
from gdn_jax.models.route import Call, Route
from tests.models.test_models import FOLDER
from tests.support.tools import MAX_REL, assert_close, assert_refused, assert_same_bits

LIMIT = MAX_REL["model"]
NEW = 20


@functools.cache
def model() -> Model:
    return load(FOLDER, weights="f32")


@functools.cache
def expected() -> tuple[np.ndarray, np.ndarray]:
    with np.load(FOLDER / "expected.npz") as file:
        return file["ids"], file["greedy"]


def prompt() -> list[int]:
    return expected()[0][:70].tolist()


def greedy(n: int) -> list[int]:
    return expected()[1][:n].tolist()


def generate(*prompts: Any, **options: Any) -> list[host.Generated]:
    options = dict(max_new_tokens=NEW, stop_tokens=()) | options
    return model().generate(list(prompts), **options)


def rows_of_three() -> list[list[int]]:
    """65, 128 and 70 tokens: programs of one width."""
    return [list(range(20, 85)), list(range(127, -1, -1)), prompt()]


@functools.cache
def ragged() -> list[host.Generated]:
    return generate(*rows_of_three())


def test_greedy_tokens_are_those_of_transformers() -> None:
    (found,) = generate(prompt(), max_new_tokens=64)
    assert found.tokens == greedy(64)
    assert found.finish == "length"
    assert found.text == model().tokenizer.decode(found.tokens)  # pyright: ignore
    ids = np.asarray([prompt() + found.tokens[:58]])
    logits = np.asarray(model().logits(ids)[0, 69:], np.float64)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = wanted[np.arange(59), found.tokens[:59]]
    atol = LIMIT * np.abs(logits).max()
    np.testing.assert_allclose(found.logprobs[:59], wanted, atol=atol)
    timings = found.timings
    assert min(timings.prefill, timings.decode, timings.tokens_per_second or 0) > 0


def test_the_rate_leaves_out_what_the_loop_was_compiled_in() -> None:
    looks = [(3.0, 2), (30.0, 18), (31.0, 34), (32.0, 40)]
    assert host.Timings.of(1.0, looks[:2]) == host.Timings(2.0, 27.0, None)
    assert host.Timings.of(1.0, looks) == host.Timings(2.0, 29.0, 11.0)


@pytest.mark.slow
def test_ragged_rows_are_like_their_solo_runs() -> None:
    assert [len(row.tokens) for row in ragged()] == [NEW] * 3
    for row, ids in zip(ragged(), rows_of_three(), strict=True):
        (alone,) = generate(ids)
        assert row.tokens == alone.tokens
        np.testing.assert_allclose(row.logprobs, alone.logprobs, atol=1e-4)


def prefilled() -> Any:
    ids = [np.asarray(row, np.int32) for row in rows_of_three()]
    cache = ModelCache.zeros(model().cfg, 3, 256)
    return device.prefill(model().params, cache, ids, 256, Call(model().cfg))


@pytest.mark.slow
def test_a_prompt_may_be_split_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [len(row) for row in rows_of_three()]
    assert device.pieces_of(lengths, 128) == [(0, 128)]
    y, whole = prefilled()
    monkeypatch.setattr(device, "PROMPT_PIECE", 64)
    assert device.pieces_of(lengths, 128) == [(0, 64), (64, 64)]
    z, pieces = prefilled()
    assert_close(z, y, LIMIT)
    assert pieces.length.tolist() == lengths
    assert_close(pieces.states.S, whole.states.S, LIMIT)
    for b, n in enumerate(lengths):
        assert_close(pieces.k[1][b, :, :n], whole.k[1][b, :, :n], LIMIT)
        assert not np.asarray(pieces.k[1][b, :, n:]).any()


def test_how_far_a_step_looks() -> None:
    plain, by_length = Route(), Route(attention="cudnn")
    assert [device.step_reach(plain, 1, n, 4096) for n in (1, 256, 1024, 1025, 4096)] == [
        *(256, 256, 1024, 4096, 4096),
    ]
    assert device.step_reach(plain, 1, 100, 300) == 300
    assert device.step_reach(by_length, 1, 1024, 4096) == 1024
    assert device.step_reach(by_length, 2, 1024, 4096) == 4096


def test_pieces_hold_every_token_once() -> None:
    for lengths in ([1], [8192], [5000, 1], [2049], [3] * 32, [100] * 5000, [40000]):
        at, room = 0, 2 * max(lengths)
        for start, width in device.pieces_of(lengths, room):
            assert start == at
            at += width
        assert max(lengths) <= at
        widest = max(width for _, width in device.pieces_of(lengths, room))
        assert widest <= device.PROMPT_PIECE // (1 + (room > device.LARGE_ROOM))
        assert len(lengths) * widest <= max(device.PROMPT_PIECES, 16 * len(lengths))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tokens() -> None:
    options = dict(temperature=1.0, top_p=0.9, seed=5)
    rows = generate(*rows_of_three(), **options)
    assert [r.tokens for r in generate(*rows_of_three(), **options)] == [r.tokens for r in rows]
    other = generate(*rows_of_three(), **options | dict(seed=6))
    assert [r.tokens for r in other] != [r.tokens for r in rows]
    # Row 0 does not see that others are there; equal prompts in other rows draw otherwise.
    same = generate(*[rows_of_three()[0]] * 3, **options)
    assert same[0].tokens == rows[0].tokens
    assert same[1].tokens != same[0].tokens


@pytest.mark.slow
def test_a_penalty_counts_the_prompt_and_the_answer() -> None:
    ids = [list(range(20, 85)), list(range(100)), list(range(30, 128))]
    for row, mine in zip(generate(*ids, repetition_penalty=1e6), ids, strict=True):
        assert len({*row.tokens, *mine}) == NEW + len(mine)


def test_a_stop_token_ends_its_row_alone() -> None:
    stop = ragged()[1].tokens[9]
    rows = generate(*rows_of_three(), stop_tokens=[stop])
    for row, free in zip(rows, ragged(), strict=True):
        wanted = free.tokens
        ended = stop in wanted
        assert row.tokens == (wanted[: wanted.index(stop)] if ended else wanted)
        assert row.finish == ("stop" if ended else "length")
        assert len(row.logprobs) == len(row.tokens)
    assert rows[1].finish == "stop"
    assert "length" in {row.finish for row in rows}


def test_the_checkpoints_stop_tokens_are_the_default() -> None:
    stops = model().tokenizer.stop_tokens  # pyright: ignore
    (found,) = generate(prompt(), stop_tokens=None)
    wanted = [token in stops for token in greedy(64)].index(True)
    assert found.tokens == greedy(wanted)


def test_a_stop_string_ends_the_text_before_it() -> None:
    free = ragged()
    at = free[1].text[4:6]  # pyright: ignore
    rows = generate(*rows_of_three(), stop_strings=[at])
    assert rows[1].finish == "stop"
    for row, other in zip(rows, free, strict=True):
        assert row.text == other.text.split(at)[0]  # pyright: ignore
        assert row.tokens == other.tokens[: len(row.tokens)]
    assert at in model().tokenizer.decode(rows[1].tokens)  # pyright: ignore
    assert at not in model().tokenizer.decode(rows[1].tokens[:-1])  # pyright: ignore


def test_the_host_reads_while_the_device_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    decode = device.decode

    def spy(*args: Any) -> Any:
        events.append("start")
        return decode(*args)

    monkeypatch.setattr(device, "decode", spy)
    (found,) = generate(prompt(), on_tokens=lambda row, new: events.append((row, new)))
    told = [e for e in events if e != "start"]
    assert [t for _, new in told for t in new] == found.tokens
    assert [len(new) for _, new in told] == [1, 8, 8, 3]
    assert [e if e == "start" else "read" for e in events] == [
        *("read", "start", "start", "read", "start", "read", "read"),
    ]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_ctrl_c_leaves_with_what_there_is(call: int) -> None:
    told = []

    def on_tokens(row: int, new: list[int]) -> None:
        told.append(new)
        if len(told) == call:
            raise KeyboardInterrupt

    (found,) = generate(prompt(), on_tokens=on_tokens)
    assert found.finish == "interrupted"
    assert found.tokens == greedy(len(found.tokens))
    assert len(found.tokens) == 1 + 8 * (call - 1)


def assert_updated_in_place(text: str, cache: Any) -> None:
    """The program writes states, keys and values, and copies none of them whole."""
    for x in (cache.states.S, cache.states.conv_hist, cache.k[0]):
        made = [
            line for line in text.splitlines() if f"= f32[{','.join(map(str, x.shape))}]" in line
        ]
        assert made
        assert not [line for line in made if re.search(r" (copy|copy-start|transpose)\(", line)]


def test_the_loop_ends_with_its_last_row() -> None:
    cfg, params = model().cfg, model().params
    logits, cache = prefilled()
    made, stops, sampling = jnp.zeros(3, jnp.int32), jnp.full(4, -1, jnp.int32), Sampling.of()
    left = jnp.asarray([2, 1, 20], jnp.int32)
    state = device.Rows(cache, jnp.zeros(3, jnp.int32), made, left, None)
    state, chosen = device.first(state, logits, sampling, stops)
    assert state.left.tolist() == [1, 0, 19]
    before = jax.tree.map(np.asarray, state)
    keep = jnp.asarray([True, True, False])
    call = Call(cfg, reach=256)
    compiled = device.decode.lower(params, state, keep, sampling, stops, call, 8).compile()
    text = compiled.as_text()
    assert text
    assert_updated_in_place(text, before.cache)
    state, chosen = compiled(params, state, keep, sampling, stops)
    assert (np.asarray(chosen.tokens) >= 0).sum(0).tolist() == [1, 0, 0]
    assert chosen.tokens[0, 0] == ragged()[0].tokens[1]
    assert state.cache.length.tolist() == [66, 128, 70]
    for b in (1, 2):
        assert_same_bits(state.cache.states.S[:, b], before.cache.states.S[:, b])
        assert_same_bits([k[b] for k in state.cache.k], [k[b] for k in before.cache.k])


def test_room_is_asked_for_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (exact,) = generate(prompt(), max_new_tokens=186, context=256)
    assert exact.tokens[:64] == greedy(64)
    assert (len(exact.tokens), exact.finish) == (186, "length")
    monkeypatch.setattr(device, "prefill", lambda *_: pytest.fail("ran"))
    refused(
        "prompt 1 of 70 tokens with 20 new ones needs room for 90 tokens; there is 89",
        *([1], prompt()),
        context=89,
    )


def refused(text: str, *prompts: Any, **options: Any) -> None:
    assert_refused(lambda: generate(*prompts, **options), text, error=gdn.GenerationError)


def test_requests_that_cannot_be_met() -> None:
    refused("prompts is no prompts; needed a list of at least one")
    refused("prompt 1 is empty; needed at least one token", [1], [])
    refused("prompt 0 is empty", "")
    refused("prompt 0 has token 128 at 1; needed 0 to 127", [1, 128])
    refused("prompt 0 has token -1 at 0", [-1])
    refused("prompt 0 has shape (1,) and dtype float64", [1.5])
    refused("prompt 0 has rows of different lengths", [[1], [1, 2]])
    refused("max_new_tokens is 0; needed a whole number from 1 up", [1], max_new_tokens=0)
    refused("temperature is -1", [1], temperature=-1)
    assert_refused(lambda: model().generate("x"), "is one text", error=gdn.GenerationError)
    bare = Model.of(model().params, model().cfg)
    for prompts, more, text in (
        (["x"], {}, "prompt 0 is text"),
        ([[1]], {"stop_strings": ["x"]}, "stop strings need a tokenizer"),
    ):
        call = functools.partial(bare.generate, prompts, **more)
        assert_refused(call, text, error=gdn.GenerationError)
    for bad, text in (([1, 2], "shape (2,)"), ([[]], "shape (1, 0)"), ([[128]], "token 128")):
        assert_refused(lambda bad=bad: model().logits(bad), text, error=gdn.GenerationError)


def test_too_little_memory_says_what_was_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    with monkeypatch.context() as patched:
        patched.setattr(device, "prefill", exhausted)
        fragments = "GB of weights", "cache for 1 rows of 256 tokens", "try weights='q4'"
        assert_refused(lambda: generate([1]), *fragments, error=gdn.DeviceMemoryError)
    monkeypatch.setattr(memory, "free_bytes", lambda: 1000)
    monkeypatch.setattr(device, "prefill", lambda *_: pytest.fail("ran"))
    fragments = "cache for 1 rows of 256 tokens: needed", "0.0 MB free", "a smaller context"
    assert_refused(lambda: generate([1]), *fragments, error=gdn.DeviceMemoryError)
