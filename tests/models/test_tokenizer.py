"""Text to tokens and back, streamed text, chat templates, and files that are refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from gdn_jax import TextError
from gdn_jax.models.generation.tokenizer import Tokenizer, read_text, stop_tokens
from gdn_jax.verify.model.checks import BUNDLED
from tests.support.tools import assert_refused

TINY = BUNDLED
END = 256


def printable() -> dict[int, str]:
    """Every byte and the letter that stands for it in byte-level BPE: its own, or one from 256."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {b: chr(b) for b in own} | {b: chr(256 + i) for i, b in enumerate(others)}


LETTERS = printable()
MERGES = [(0xE4, 0xBD), (0xA0, 0xE5), (0x9F, 0x98), (0x74, 0x68)]
"""Tokens of two bytes, one of them the end of a letter and the start of the next."""


def library() -> Library:
    vocab = {LETTERS[b]: b for b in range(256)}
    pairs = [(LETTERS[a], LETTERS[b]) for a, b in MERGES]
    vocab |= {a + b: END + i for i, (a, b) in enumerate(pairs)}
    made = Library(BPE(vocab, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def special(made: Library) -> Library:
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


BYTES = Tokenizer(special(library()))
MARK = BYTES.encode("<|end|>")[0]


def streamed(ids: list[int]) -> tuple[list[str], str]:
    stream = BYTES.stream()
    return [stream.push(i) for i in ids], stream.finish()


@given(st.text(max_size=12))
def test_text_comes_back(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    pieces, rest = streamed(ids)
    assert "".join(pieces) + rest == text


def test_a_letter_is_shown_when_it_is_whole() -> None:
    ids = BYTES.encode("你好 th")
    assert streamed(ids) == (["", "", "", "你好", " ", "th"], "")


@given(st.lists(st.integers(0, MARK), max_size=16))
def test_any_tokens_are_streamed_as_they_are_decoded(ids: list[int]) -> None:
    pieces, rest = streamed(ids)
    assert "".join(pieces) + rest == BYTES.decode(ids)


@given(st.text("aé你😀", min_size=1, max_size=6), st.data())
def test_never_half_a_letter(text: str, data: st.DataObject) -> None:
    """Cut anywhere, what was shown is a beginning of the text."""
    ids = [*text.encode()]
    cut = data.draw(st.integers(0, len(ids)))
    pieces, _ = streamed(ids[:cut])
    assert text.startswith("".join(pieces))
    assert len("".join(pieces)) == len(bytes(ids[:cut]).decode(errors="ignore"))


def test_special_tokens_are_not_shown_and_end_nothing_by_themselves() -> None:
    ids = [*b"a", MARK, *b"b"]
    assert BYTES.decode(ids) == "ab"
    assert streamed(ids) == (["a", "", "b"], "")


def test_a_letter_that_stays_half_is_shown_at_the_end() -> None:
    assert streamed([0x61, 0xE4, 0xBD]) == (["a", "", ""], "\ufffd")


def test_the_bundled_tokenizer() -> None:
    found = Tokenizer.load(TINY)
    assert found is not None
    text = "the state of the art, café über\n"
    ids = found.encode(text)
    assert found.decode(ids) == text
    assert max(ids) < 128
    assert found.encode("the") == [found.encode("t")[0], found.encode("he")[0]]
    assert found.decode(found.encode("日")) == "???"
    assert found.stop_tokens == tuple(found.encode("<|im_end|><|endoftext|>"))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    head = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert found.chat(messages) == head + "<|im_start|>assistant\n"
    assert found.chat(messages, add_generation_prompt=False) == head


def folder(path: Path, **files: object) -> Path:
    """A directory of a tokenizer; names have __ for a dot, and objects are written as JSON."""
    library().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return path


def loaded(path: Path, **files: object) -> Tokenizer:
    found = Tokenizer.load(folder(path, **files))
    assert found is not None
    return found


TOOLS = """\
{%- if messages[0].role != 'user' %}
    {{ raise_exception('the first turn is the user\\'s') }}
{%- endif %}
{{ bos_token }}{{ strftime_now('%Y') | length }}
{%- for m in messages %}
    {%- if loop.index > 1 %}
        {%- break %}
    {%- endif %}
    {{- m.content | tojson }}{{ m.names | tojson(indent=1) }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %} no{% endif %}
"""


def test_what_templates_use(tmp_path: Path) -> None:
    """Exceptions, dates, JSON that is not escaped for HTML, loop controls, trimmed blocks."""
    settings = {"bos_token": {"content": "<s>"}, "chat_template": TOOLS}
    found = loaded(tmp_path, tokenizer_config__json=settings)
    turn = {"role": "user", "content": "<é>", "names": ["a"]}
    assert found.chat([turn, turn]) == '<s>4"<é>"[\n "a"\n]'
    assert found.chat([turn], thinking=False).endswith(" no")
    assert_refused(
        lambda: found.chat([turn | {"role": "system"}]), "the first turn is", error=TextError
    )


def test_where_a_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    settings = {"chat_template": named}
    assert loaded(tmp_path, tokenizer_config__json=settings).chat([]) == "y"
    both = loaded(tmp_path, tokenizer_config__json=settings, chat_template__jinja="z")
    assert both.chat([]) == "z"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat_template.jinja"),
        ("{% if %}", "chat template:"),
        ("{{ messages[3].content.x }}", "chat template:"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
    ],
)
def test_templates_that_are_refused(template: str | None, said: str, tmp_path: Path) -> None:
    files = {} if template is None else {"chat_template__jinja": template}
    found = loaded(tmp_path, **files)
    assert_refused(lambda: found.chat([]), str(tmp_path), said, error=TextError)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, ()),
        ({"config__json": {"eos_token_id": 5}}, (5,)),
        ({"config__json": {"eos_token_id": None, "text_config": {"eos_token_id": 6}}}, (6,)),
        ({"generation_config__json": {"eos_token_id": [7, 8, 7]}, "config__json": {}}, (7, 8)),
        (
            {"generation_config__json": {}, "config__json": {"eos_token_id": 9}},
            (9,),
        ),
        (
            {
                "generation_config__json": {"eos_token_id": 0},
                "config__json": {"eos_token_id": 9, "text_config": {"eos_token_id": 6}},
            },
            (0,),
        ),
    ],
)
def test_stop_tokens(files: dict, wanted: tuple[int, ...], tmp_path: Path) -> None:
    assert loaded(tmp_path, **files).stop_tokens == wanted


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", b"{", "not a tokenizer"),
        ("tokenizer.json", b"\xff{}", "not UTF-8 (byte 0xff at 0, line 1)"),
        ("tokenizer_config.json", b"{\n\xe9", "not UTF-8 (byte 0xe9 at 2, line 2)"),
        ("tokenizer_config.json", b"{", "not JSON"),
        ("config.json", b"[]", "needed an object"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", b'{"eos_token_id": [-1]}', "eos_token_id"),
        ("chat_template.jinja", b"\xc3(", "not UTF-8 (byte 0xc3 at 0, line 1)"),
    ],
)
def test_files_that_are_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    assert_refused(lambda: Tokenizer.load(tmp_path), str(tmp_path), said, error=TextError)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    assert stop_tokens(tmp_path) == ()
    assert_refused(lambda: read_text(tmp_path / "no"), "no: cannot be read", error=TextError)


def test_text_that_is_not_utf8() -> None:
    assert_refused(lambda: BYTES.encode("a\udcff"), "not UTF-8", "at 1", error=TextError)
