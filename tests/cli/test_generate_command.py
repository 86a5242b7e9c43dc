"""``gdn-jax generate``: what it hands to a model, what it shows and when, and how it ends."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_jax.cli import answer
from gdn_jax.cli.main import main
from gdn_jax.models.generation.host import Generated, Timings
from gdn_jax.models.generation.tokenizer import Tokenizer
from gdn_jax.verify.model.checks import BUNDLED

TINY = BUNDLED
TOKENIZER = Tokenizer.load(TINY)
assert TOKENIZER is not None
encode, decode, chat = TOKENIZER.encode, TOKENIZER.decode, TOKENIZER.chat
Out = pytest.CaptureFixture[str]


def run(*arguments: str, model: Path = TINY) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--model", str(model), *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


class StandIn:
    """Says what it is told to, a few tokens at a time, and remembers what it was asked."""

    def __init__(self, *says: str, finish: str = "length", look: Callable[[], None] | None = None):
        self.says, self.finish, self.look = list(says), finish, look or (lambda: None)
        self.asked: list[dict[str, Any]] = []

    def generate(self, prompts: Sequence[list[int]], *, on_tokens: Any, **options: Any) -> Any:
        self.asked.append({"prompts": prompts, **options})
        found = []
        for row in range(len(prompts)):
            text = self.says.pop(0)
            ids = encode(text)
            for at in range(0, len(ids), 2):
                on_tokens(row, ids[at : at + 2])
                self.look()
            for stop in options["stop_strings"]:
                text = text.split(stop)[0]
            times = Timings(0.5, 1.0, 4.0)
            found.append(Generated(ids, [-0.5] * len(ids), text, self.finish, times))
        return found


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    def put(*texts: str, **options: Any) -> StandIn:
        made = StandIn(*texts, **options)
        monkeypatch.setattr(answer, "loaded", lambda *_: made)
        return made

    return put


def expected() -> tuple[list[int], list[int]]:
    """A prompt, and the tokens behind it that transformers finds most likely."""
    with np.load(TINY / "expected.npz") as file:
        return file["ids"][:70].tolist(), file["greedy"].tolist()


def test_the_bundled_checkpoint_says_what_transformers_does(
    tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the stop token, which is not part of it; then again, with Ctrl-C on the way."""
    prompt, greedy = expected()
    prompts, file = tmp_path / "p.jsonl", tmp_path / "r.json"
    prompts.write_text(json.dumps({"tokens": prompt}), encoding="utf-8")
    arguments = ["--prompts", str(prompts), "--weights", "f32", "--json", str(file)]
    assert run(*arguments) == 0
    found = json.loads(file.read_text())
    (result,) = found["results"]
    wanted = greedy[: greedy.index(encode("<|endoftext|>")[0])]
    assert len(wanted) == 17
    assert result["tokens"] == wanted
    assert result["finish"] == "stop"
    assert result["prompt_tokens"] == prompt
    assert len(result["logprobs"]) == 17
    assert all(-6 < p < 0 for p in result["logprobs"])
    assert found["weights"] == "f32"
    assert found["load_s"] > 0
    assert found["device_peak_bytes"] is None or found["device_peak_bytes"] > 0
    assert found["load_host_peak_bytes"] is None or found["load_host_peak_bytes"] > 1e6
    printed = capsys.readouterr()
    assert printed.out == result["text"] + "\n" == decode(wanted) + "\n"
    assert "17 tokens" in printed.err
    assert "53 tensors" in printed.err

    honest = answer.Shown.add

    def interrupted(self: Any, row: int, tokens: Sequence[int]) -> None:
        honest(self, row, tokens)
        if len(tokens) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(answer.Shown, "add", interrupted)
    assert run(*arguments) == 130
    (result,) = json.loads(file.read_text())["results"]
    assert result["finish"] == "interrupted"
    assert 1 < len(result["tokens"]) < 17
    assert result["tokens"] == wanted[: len(result["tokens"])]
    assert capsys.readouterr().out == result["text"] + "\n"


def test_text_is_shown_while_it_comes(says: Callable[..., StandIn], capsys: Out) -> None:
    seen: list[str] = []
    says("café, the end", look=lambda: seen.append(capsys.readouterr().out))
    assert run("--prompt", "x") == 0
    seen.append(capsys.readouterr().out)
    assert "".join(seen) == "café, the end\n"
    assert len([piece for piece in seen if piece]) > 4


def test_nothing_behind_a_stop_string_is_ever_shown(
    says: Callable[..., StandIn], capsys: Out
) -> None:
    model = says("one END two")
    assert run("--prompt", "x", "--stop", "END", "--stop", "zz") == 0
    assert capsys.readouterr().out == "one \n"
    assert model.asked[0]["stop_strings"] == ["END", "zz"]


def test_settings_reach_the_model(says: Callable[..., StandIn]) -> None:
    model = says("")
    given = {"max_new_tokens": 5, "temperature": 0.5, "top_k": 7, "top_p": 0.25}
    given |= {"repetition_penalty": 1.5, "seed": 9, "context": 99}
    options = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items()]
    assert run("--prompt", "the x", *[part for option in options for part in option]) == 0
    assert model.asked == [{"prompts": [encode("the x")], "stop_strings": [], **given}]


def test_several_prompts_are_answered_in_their_order(
    says: Callable[..., StandIn], tmp_path: Path, capsys: Out
) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes("één\r\n\n{two}\n".encode())
    model = says("first", "second")
    assert run("--prompts", str(file)) == 0
    assert model.asked[0]["prompts"] == [encode("één"), encode("{two}")]
    printed = capsys.readouterr()
    assert printed.out == "first\nsecond\n"
    assert printed.err.index("line 1") < printed.err.index("line 3")


def test_json_lines(says: Callable[..., StandIn], tmp_path: Path, capsys: Out) -> None:
    """Every kind of line; --json - has standard output for itself."""
    turn = [{"role": "user", "content": "hi"}]
    lines = ["a\nb", {"prompt": "c"}, {"tokens": [1, 2]}, {"messages": turn}]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    model = says("w", "x", "y", "z", finish="interrupted")
    assert run("--prompts", str(file), "--json", "-") == 130
    asked = [encode("a\nb"), encode("c"), [1, 2], encode(chat(turn))]
    assert model.asked[0]["prompts"] == asked
    found = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in found["results"]] == ["w", "x", "y", "z"]
    assert [row["prompt_tokens"] for row in found["results"]] == asked
    assert found["results"][0]["timings"]["prefill"] == 0.5
    assert found["sampling"]["max_new_tokens"] == 128


def test_a_prompt_as_a_turn_of_a_chat(says: Callable[..., StandIn]) -> None:
    model = says("yes")
    assert run("--prompt", "hi", "--chat") == 0
    wanted = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.asked[0]["prompts"] == [encode(wanted)]


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_conversation(
    says: Callable[..., StandIn], monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """Every turn has all those before it, answers included."""
    stdin(monkeypatch, "hi\n\nhow, é\n".encode())
    model = says("yes", "so")
    assert run("--chat") == 0
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    turns.append({"role": "user", "content": "how, é"})
    assert [one["prompts"] for one in model.asked] == [
        [encode(chat(turns[:1]))],
        [encode(chat(turns))],
    ]
    assert capsys.readouterr().out == "yes\nso\n"


def test_a_conversation_that_is_interrupted(
    says: Callable[..., StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, b"hi\nhow\n")
    model = says("yes", "so", finish="interrupted")
    assert run("--chat") == 130
    assert len(model.asked) == 1


def folder(path: Path, *, without: str) -> Path:
    for file in TINY.iterdir():
        if file.name not in (without, "expected.npz"):
            (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needed --prompt, --prompts or --chat"),
        (["--prompt", "a", "--prompts", "b"], "exclude each other"),
        (["--prompt", ""], "--prompt: empty"),
        (["--prompt", "a\udcff"], "--prompt: not UTF-8"),
        (["--prompt", "a", "--stop", ""], "stop string ''"),
        (["--prompt", "a", "--stop", "\udcff"], "--stop: not UTF-8"),
        (["--prompts", "/no/file"], "/no/file: cannot be read"),
        (["--prompt", "a", "--top-p", "0"], "--top-p"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "a", "--weights", "q5"], "q5"),
        (["--prompt", "a", "--json", "/no/such/r.json"], "no directory"),
        (["--chat", "--json", "-"], "no --json"),
        (["--prompt", "a", "--backend", "cuda"], "no backend 'cuda'"),
        (["--prompt", "a", "--context", "3", "--max-new-tokens", "9"], "room for 10 tokens"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], said: str, capsys: Out) -> None:
    assert run(*arguments) == 2
    refused(said, capsys)


def refused(said: str, capsys: Out) -> None:
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("gdn-jax: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert not printed.out
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n \n", "no prompt"),
        (b'"a"\n{', "line 2: not JSON"),
        (b"3", "needed a string"),
        (b'{"prompt": "a", "tokens": [1]}', "needed a string"),
        (b'{"prompt": 3}', "needed a string"),
        (b'{"tokens": ["a"]}', "needed a string"),
        (b'{"tokens": []}', "empty"),
        (b'{"text": "a"}', "needed a string"),
        (b'{"tokens": [1, 128]}', "needed 0 to 127"),
        (b'"\xff"', "not UTF-8"),
    ],
)
def test_files_of_prompts_that_are_refused(
    content: bytes, said: str, tmp_path: Path, capsys: Out
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    assert run("--prompts", str(file)) == 2
    refused(said, capsys)


@pytest.mark.parametrize(
    ("without", "arguments", "said"),
    [
        ("tokenizer.json", ["--prompt", "a"], "no tokenizer.json"),
        ("tokenizer.json", ["--chat"], "no tokenizer.json"),
        ("chat_template.jinja", ["--prompt", "a", "--chat"], "no chat_template.jinja"),
        ("config.json", ["--prompt", "a"], "config.json"),
        ("model.safetensors", ["--prompt", "a"], "safetensors"),
    ],
)
def test_checkpoints_that_lack_a_file(
    without: str, arguments: list[str], said: str, tmp_path: Path, capsys: Out
) -> None:
    assert run(*arguments, model=folder(tmp_path, without=without)) == 2
    refused(said, capsys)


def test_no_such_model(tmp_path: Path, capsys: Out) -> None:
    assert run("--prompt", "a", model=tmp_path / "no") == 2
    refused("no such directory", capsys)


def test_tokens_need_no_tokenizer(
    says: Callable[..., StandIn], tmp_path: Path, capsys: Out
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"tokens": [5, 6]}', encoding="utf-8")
    model = says("the")
    assert run("--prompts", str(file), model=folder(tmp_path, without="tokenizer.json")) == 0
    assert model.asked[0]["prompts"] == [[5, 6]]
