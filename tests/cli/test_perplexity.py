"""Perplexity: the mean log-likelihood that transformers' logits give, in chunks and in windows."""

import contextlib
import io
import json
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_jax import TextError
from gdn_jax.cli import compare
from gdn_jax.cli.main import main
from gdn_jax.models.generation import perplexity
from gdn_jax.models.generation.perplexity import Perplexity, measure, windows
from gdn_jax.models.model import load
from gdn_jax.models.route import Route
from gdn_jax.verify.model.checks import BUNDLED
from tests.support.tools import assert_refused

TINY = BUNDLED
CHUNK = 32


def test_it_is_what_the_logits_of_transformers_say() -> None:
    """134 tokens in chunks of 32: the last one is not full, and all carry the cache."""
    with np.load(TINY / "expected.npz") as file:
        ids, logits = file["ids"], file["logits"].astype(np.float64)
    logits = logits[:-1] - logits[:-1].max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, ids[1:, None].astype(int), axis=-1)[:, 0]
    wanted = np.mean(np.log(np.exp(logits).sum(-1)) - chosen)
    done = []
    found = measure(
        load(TINY, weights="f32"), ids, chunk=CHUNK, progress=lambda *at: done.append(at)
    )
    assert found.nll == pytest.approx(wanted, rel=1e-6)
    assert found.tokens == 133
    assert found.perplexity == pytest.approx(np.exp(wanted), rel=1e-5)
    assert done == [(32, 133), (64, 133), (96, 133), (128, 133), (133, 133)]


def test_a_hopeless_text_is_infinitely_perplexing() -> None:
    assert Perplexity(1e4, 3).perplexity == np.inf


@given(st.integers(2, 60), st.data())
def test_every_token_is_predicted_once(count: int, data: st.DataObject) -> None:
    context = data.draw(st.integers(2, count))
    stride = data.draw(st.integers(1, context - 1))
    predicted = []
    for start, first, end in windows(count, context, stride):
        assert 0 <= start < first < end <= count
        assert end - start <= context
        assert start == 0 or first - start >= context - stride
        predicted += range(first, end)
    assert predicted == list(range(1, count))


VOCAB = 7


def score(place: int, token: int, target: int) -> float:
    """A stand-in's logit: it depends on the place in the window and on the token there."""
    return np.sin(place + 3 * token) * target


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of which only places and tokens matter; its cache is the number of tokens run."""

    def run(_: Any, cache: int, tokens: Any, lengths: Any, call: Any) -> tuple[Any, int]:
        assert call.fresh == (cache == 0)
        assert call.reach >= cache + int(lengths[0])
        row = np.asarray(tokens)[0]
        y = [[score(cache + t, i, v) for v in range(VOCAB)] for t, i in enumerate(row)]
        return jnp.asarray(y, jnp.float32)[None], cache + int(lengths[0])

    cache = types.SimpleNamespace(zeros=lambda cfg, batch, room, dtype: 0)
    monkeypatch.setattr(perplexity, "forward_by_block", run)
    monkeypatch.setattr(perplexity, "ModelCache", cache)
    cfg = types.SimpleNamespace(vocab_size=VOCAB)
    return types.SimpleNamespace(params=None, cfg=cfg, route=Route(), kv_dtype=jnp.float32)


@pytest.mark.parametrize(
    ("context", "stride", "chunk"),
    [(None, None, 4), (None, None, 100), (9, None, 4), (9, 2, 3), (8, 7, 8), (50, 3, 5)],
)
def test_windows_and_chunks(
    context: int | None, stride: int | None, chunk: int, stand_in: Any
) -> None:
    ids = np.random.default_rng(1).integers(0, VOCAB, 29)
    size = min(context or 29, 29)
    step = stride or size // 2
    losses = []
    for start, first, end in windows(29, size, step):
        for t in range(first, end):
            y = np.array([score(t - 1 - start, ids[t - 1], v) for v in range(VOCAB)])
            losses.append(np.log(np.exp(y).sum()) - y[ids[t]])
    found = measure(stand_in, ids, context=context, stride=stride, chunk=chunk)
    assert found.nll == pytest.approx(np.mean(losses), rel=1e-5)
    assert len(losses) == found.tokens == 28


@pytest.mark.parametrize(
    ("ids", "options", "said"),
    [
        ([1], {}, "1 tokens; needed at least 2"),
        ([1, VOCAB], {}, "token 7"),
        ([-1, 2], {}, "-1"),
        ([1, 2], {"context": 1}, "context 1"),
        ([1, 2, 3], {"context": 2, "stride": 2}, "stride 2"),
        ([1, 2, 3], {"stride": 0}, "stride 0"),
        ([1, 2], {"chunk": 0}, "chunk 0"),
    ],
)
def test_what_is_refused(ids: list[int], options: dict, said: str, stand_in: Any) -> None:
    assert_refused(lambda: measure(stand_in, ids, **options), said, error=TextError)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["perplexity", "--model", str(TINY), *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and int4 side by side, on the first tokens of a text."""
    monkeypatch.setattr(compare, "CHUNK", CHUNK)
    text, file = tmp_path / "text", tmp_path / "r.json"
    text.write_text("the state of the art in the street, " * 9, encoding="utf-8")
    options = ["--weights", "f32", "--weights", "q4", "--tokens", "101", "--json", str(file)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run("--text", str(text), *options) == 0
    found = json.loads(file.read_text())
    wide, narrow = found["rows"]
    assert [row["weights"] for row in found["rows"]] == ["f32", "q4"]
    assert wide["tokens"] == narrow["tokens"] == 100
    assert wide["bytes"] > narrow["bytes"]
    assert wide["ratio"] == 1
    assert narrow["ratio"] == pytest.approx(narrow["perplexity"] / wide["perplexity"])
    assert narrow["nll"] != wide["nll"]
    bits = wide["nll"] * 100 / np.log(2)
    assert wide["bits_per_byte"] == pytest.approx(bits / found["text_bytes"])
    assert 150 < found["text_bytes"] < 324
    for said in ("f32", "q4", "one sequence", f"{wide['nll']:.4f}"):
        assert said in printed.getvalue()


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (b"ab\n\xff", (), "not UTF-8 (byte 0xff at 3, line 2)"),
        (b"", (), "empty"),
        (b"a", (), "1 token"),
        (b"abc", ("--stride", "4"), "--context"),
        (b"abc", ("--context", "4", "--stride", "4"), "--context"),
        (b"abc", ("--weights", "q5"), "q5"),
    ],
)
def test_bad_input_is_one_line(
    content: bytes,
    options: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_bytes(content)
    assert run("--text", str(tmp_path / "text"), *options) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
