"""Text to token ids and back, with the tokenizer files of a checkpoint directory."""

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from gdn_jax.errors import TextError

Message = Mapping[str, Any]
"""A turn of a chat: ``role`` and ``content``, and whatever else the template knows."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Fields of tokenizer_config.json: the names that templates have for special tokens."""


class TextStream:
    """Tokens to text as they come: never half a character.

    Bytes that are not yet a whole character are held back;
    ``"".join(map(stream.push, ids)) + stream.finish()`` is ``tokenizer.decode(ids)``.
    """

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._held.append(token)
        text = self._decoder.step(self._tokenizer, token)
        if text is None:
            return ""
        self._held = []
        return text

    def finish(self) -> str:
        """What is held back at the end: U+FFFD for a character that never became whole."""
        held, self._held = self._held, []
        return self._tokenizer.decode(held)


class Tokenizer:
    """A ``tokenizer.json`` through the tokenizers library.

    ``stop_tokens`` are the ids that end a text; see :func:`stop_tokens`.
    """

    def __init__(
        self,
        tokenizer: _Tokenizer,
        *,
        stop_tokens: tuple[int, ...] = (),
        template: str | None = None,
        special: Mapping[str, str] | None = None,
        source: str = "tokenizer",
    ) -> None:
        self.stop_tokens = stop_tokens
        self._tokenizer, self._template = tokenizer, template
        self._special, self._source = dict(special or {}), source

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> "Tokenizer | None":
        """The tokenizer of a checkpoint directory, or None where it has no ``tokenizer.json``.

        Where ``source`` is a file, such as a model in GGUF, the directory that holds it is meant.

        The chat template is ``chat_template.jinja`` or that of ``tokenizer_config.json``.

        Raises:
            TextError: a file that is damaged or not UTF-8.
        """
        folder = Path(source)
        folder = folder.parent if folder.is_file() else folder
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            tokenizer = _Tokenizer.from_str(read_text(file))
        except TextError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise TextError(f"{file}: not a tokenizer ({_line(error)})") from None
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _token(config.get(name)) for name in _SPECIAL}
        return cls(
            tokenizer,
            stop_tokens=stop_tokens(folder),
            template=_template(folder, config),
            special={name: token for name, token in special.items() if token is not None},
            source=str(folder),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; names of special tokens in it become those tokens.

        Nothing is put before or after it.

        Raises:
            TextError: the text has surrogates, which stand for bytes that are not UTF-8.
        """
        return self._tokenizer.encode(valid(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids without special tokens; ids that have no token are left out.

        Bytes that are no UTF-8 become U+FFFD.
        """
        return self._tokenizer.decode([int(i) for i in ids])

    def stream(self) -> TextStream:
        """A decoder of one text whose tokens come one by one."""
        return TextStream(self._tokenizer)

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        thinking: bool | None = None,
    ) -> str:
        """The text that the checkpoint's chat template makes of a conversation.

        Args:
            messages: its turns, ``{"role": "user", "content": ".."}``.
            add_generation_prompt: whether the text ends with the start of the assistant's turn.
            thinking: the template's ``enable_thinking``; its own default when None.

        Raises:
            TextError: no template, or one that does not take these messages.
        """
        if self._template is None:
            found = "no chat_template.jinja and no chat_template in tokenizer_config.json"
            raise TextError(f"{self._source}: {found}; needed for a chat")
        given: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        given |= self._special
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return _environment().from_string(self._template).render(given)
        except Exception as error:  # a template is a program: it may fail in any way
            raise TextError(f"{self._source}: chat template: {_line(error)}") from None


def stop_tokens(directory: str | os.PathLike[str]) -> tuple[int, ...]:
    """Ids that end a text: ``eos_token_id``, a number or a list, in a checkpoint's settings.

    ``generation_config.json`` counts first, then ``config.json`` and its ``text_config``; the
    result is empty where none of them says.

    Raises:
        TextError: a file that is damaged, or an ``eos_token_id`` that is neither.
    """
    folder = Path(directory)
    config = _read_json(folder / "config.json")
    text = config.get("text_config")
    places = {"generation_config.json": _read_json(folder / "generation_config.json")}
    places |= {"config.json": config, "text_config": text if isinstance(text, dict) else {}}
    for name, settings in places.items():
        found = settings.get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if any(type(i) is not int or i < 0 for i in ids):
            needed = "needed token ids"
            raise TextError(f"{folder}: eos_token_id of {name} is {found!r}; {needed}")
        return tuple(dict.fromkeys(ids))
    return ()


def valid(text: str, what: str = "text") -> str:
    """``text`` itself; TextError if it has surrogates, which stand for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!r} at {error.start}"
        raise TextError(f"{what}: not UTF-8 ({found})") from None
    return text


def read_text(file: str | os.PathLike[str]) -> str:
    """A file of UTF-8 text.

    Raises:
        TextError: the file cannot be read, or is not UTF-8; then it says where.
    """
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise TextError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{data[error.start]:02x} at {error.start}, line {line}"
        raise TextError(f"{file}: not UTF-8 ({found})") from None


def _read_json(file: Path) -> dict[str, Any]:
    """An object, empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise TextError(f"{file}: not JSON ({_line(error)})") from None
    if not isinstance(found, dict):
        raise TextError(f"{file}: a JSON {type(found).__name__}; needed an object")
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token(found: Any) -> str | None:
    """A token's text: a string, or an object that holds it."""
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _environment() -> jinja2.Environment:
    """What chat templates are written for: these functions, trimmed blocks; in a sandbox."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
