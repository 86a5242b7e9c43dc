"""A whole model against transformers, and its batches and splits against itself."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.forward import forward
from gdn_jax.models.loading.load import load_params
from gdn_jax.models.route import Call
from gdn_jax.verify.model.checks import BUNDLED
from tests.support.tools import MAX_REL, assert_close, assert_refused, assert_same_bits

FOLDER = BUNDLED
CFG = ModelConfig.from_hf(FOLDER)
LIMIT = MAX_REL["model"]
ROOM = 140
"""Of every cache: pieces of one length are one program."""

CALL = Call(CFG)

run = jax.jit(forward, static_argnames="call")


@functools.cache
def params() -> Any:
    return load_params(FOLDER, CFG, weights="f32")


@functools.cache
def expected() -> tuple[np.ndarray, np.ndarray]:
    with np.load(FOLDER / "expected.npz") as file:
        return file["ids"], file["logits"]


def walk(ids: np.ndarray, *cuts: int) -> tuple[np.ndarray, ModelCache]:
    """Logits of one row, its tokens run in pieces that begin at the cuts."""
    cache, parts = ModelCache.zeros(CFG, 1, ROOM), []
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        y, cache = run(params(), cache, jnp.asarray(ids[None, start:end]), None, CALL)
        parts.append(np.asarray(y[0]))
    return np.concatenate(parts), cache


def test_prefill_and_64_steps_are_those_of_transformers() -> None:
    ids, wanted = expected()
    found, cache = walk(ids, 70, *range(71, len(ids)))
    assert_close(found, wanted, LIMIT)
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))
    assert cache.length.tolist() == [len(ids)]


@pytest.mark.slow
def test_split_anywhere() -> None:
    ids, wanted = expected()
    found, _ = walk(ids[:70], 3, 40)
    assert_close(found, wanted[:70], LIMIT)


@pytest.mark.slow
def test_rows_of_different_lengths_are_like_their_solo_runs() -> None:
    ids, _ = expected()
    rows, lengths = np.stack([ids[:37], ids[60:97]]), jnp.asarray([37, 30], jnp.int32)
    empty = ModelCache.zeros(CFG, 2, ROOM)
    y, cache = run(params(), empty, jnp.asarray(rows), lengths, CALL)
    more = jnp.asarray([[5], [6]], jnp.int32)
    z, cache = run(params(), cache, more, None, CALL)
    assert cache.length.tolist() == [38, 31]
    for b, n in enumerate(lengths.tolist()):
        alone, after = run(
            params(), ModelCache.zeros(CFG, 1, ROOM), jnp.asarray(rows[b : b + 1, :n]), None, CALL
        )
        assert_close(y[b, :n], alone[0], LIMIT)
        step, _ = run(params(), after, more[b : b + 1], None, CALL)
        assert_close(z[b], step[0], LIMIT)


def test_what_unused_room_holds_changes_no_bit() -> None:
    """Room of another size is another program, whose sums may be in another order."""
    ids = jnp.asarray(expected()[0][None, :30])
    small, large = (
        run(params(), ModelCache.zeros(CFG, 1, n), ids, None, CALL)[0] for n in (30, ROOM)
    )
    assert_close(small, large, LIMIT)
    zeros = ModelCache.zeros(CFG, 1, ROOM)
    sevens = tuple(jnp.full_like(k, 7.0) for k in zeros.k)
    held = {"k": sevens, "v": sevens}
    poisoned = dataclasses.replace(zeros, **held)
    assert_same_bits(run(params(), poisoned, ids, None, CALL)[0], large)


@pytest.mark.parametrize(
    ("changed", "fragments"),
    [
        ({"model_type": "qwen3_5_moe"}, ("qwen3_5_moe", "a dense model")),
        ({"hidden_act": "gelu"}, ("hidden_act is 'gelu'",)),
        ({"sliding_window": 512}, ("unknown settings sliding_window",)),
        ({"rope_parameters": {"rope_type": "yarn"}}, ("rope_type is 'yarn'",)),
        ({"rope_parameters": {"factor": 2}}, ("rope_parameters.factor",)),
        ({"num_key_value_heads": 3}, ("4 query heads", "multiple of 3")),
        ({"head_dim": 0}, ("head_dim is 0",)),
        ({"vocab_size": None}, ("vocab_size",)),
    ],
)
def test_settings_that_are_not_known_are_refused(changed: dict, fragments: tuple[str, ...]) -> None:
    raw = json.loads((FOLDER / "config.json").read_text(encoding="utf-8")) | changed
    assert_refused(lambda: ModelConfig.from_hf(raw), *fragments, error=gdn.ConfigError)
