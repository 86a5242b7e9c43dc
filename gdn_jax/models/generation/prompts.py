"""What to generate from: a text, the turns of a chat, or token ids; one, or a file of them."""

import dataclasses
import json
import os
from typing import Any

from gdn_jax.errors import TextError
from gdn_jax.models.generation.tokenizer import Message, Tokenizer, read_text, valid

_NEEDED = 'needed a string, or an object of one of "prompt", "messages" and "tokens"'
_WITHOUT = 'a file of JSON lines {"tokens": [..]} does without'


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One of ``text``, ``messages`` and ``tokens``; ``where`` names it in errors."""

    where: str
    text: str | None = None
    messages: list[Message] | None = None
    tokens: list[int] | None = None

    def as_chat(self) -> "Prompt":
        """A prompt of text as the user's turn of a chat; any other prompt unchanged."""
        if self.text is None:
            return self
        return Prompt(self.where, messages=[{"role": "user", "content": self.text}])

    def encode(self, tokenizer: Tokenizer | None, source: str, thinking: bool | None) -> list[int]:
        """Its token ids, at least one.

        Args:
            tokenizer: the model's, or None when it has none.
            source: the model's path, for errors.
            thinking: see :meth:`gdn_jax.models.generation.tokenizer.Tokenizer.chat`.

        Raises:
            TextError: no tokenizer where one is needed, a chat template that is missing or does not
                take these messages, or no tokens.
        """
        ids = self.tokens
        if ids is None:
            if tokenizer is None:
                found = f"{source}: no tokenizer.json there"
                raise TextError(f"{found}; needed for the text of {self.where}; {_WITHOUT}")
            text = self.text
            if text is None:
                text = tokenizer.chat(self.messages or [], thinking=thinking)
            ids = tokenizer.encode(valid(text, self.where))
        if not ids:
            raise TextError(f"{self.where}: empty; needed at least one token")
        return ids


def read_prompts(file: str | os.PathLike[str]) -> list[Prompt]:
    """The prompts of a file: one a line, or JSON lines when its name ends in ``.jsonl``.

    A line of JSON is a string, or an object: ``{"prompt": ".."}``, ``{"tokens": [1, 2]}`` or
    ``{"messages": [{"role": "user", "content": ".."}]}``. Blank lines are left out.

    Raises:
        TextError: no such file, not UTF-8, no prompt in it, or a line that is none of these.
    """
    lines = enumerate(read_text(file).split("\n"), 1)
    named = [(f"{file}, line {n}", line.removesuffix("\r")) for n, line in lines if line.strip()]
    if not named:
        raise TextError(f"{file}: no prompt; needed one a line")
    if os.fspath(file).endswith(".jsonl"):
        return [_from_json(where, line) for where, line in named]
    return [Prompt(where, text=line) for where, line in named]


def _from_json(where: str, line: str) -> Prompt:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise TextError(f"{where}: not JSON ({error.msg} at {error.pos})") from None
    given: Any = {"prompt": found} if isinstance(found, str) else found
    if not isinstance(given, dict) or len(given) != 1:
        raise TextError(f"{where}: {line[:60]}; {_NEEDED}")
    ((kind, value),) = given.items()
    if kind == "prompt" and isinstance(value, str):
        return Prompt(where, text=value)
    if kind == "messages" and _list_of(value, dict):
        return Prompt(where, messages=value)
    if kind == "tokens" and _list_of(value, int):
        return Prompt(where, tokens=value)
    raise TextError(f"{where}: {line[:60]}; {_NEEDED}")


def _list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)
