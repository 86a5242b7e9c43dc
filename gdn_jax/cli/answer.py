"""What ``gdn-jax generate`` does: load, generate, show text as it comes, write the result."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from gdn_jax._core.environment import environment
from gdn_jax._core.files import write_atomically
from gdn_jax.cli.host_memory import HostPeak
from gdn_jax.cli.loading import loaded, waiting
from gdn_jax.cli.options import INTERRUPTED
from gdn_jax.models.generation.host import Generated
from gdn_jax.models.generation.prompts import Prompt
from gdn_jax.models.generation.stopping import StopStrings
from gdn_jax.models.generation.tokenizer import Message, Tokenizer, valid
from gdn_jax.models.loading.memory import peak_bytes
from gdn_jax.models.model import Model
from gdn_jax.report.record import finite


@dataclasses.dataclass(frozen=True)
class Options:
    """Of a run: the model, and ``sampling``, the arguments of its ``generate``."""

    model: str
    weights: str
    backend: str | None
    thinking: bool | None
    sampling: dict[str, Any]

    def load(self) -> Model:
        """The model, with a bar."""
        return loaded(self.model, self.weights, self.backend)

    def generate(self, model: Model, prompts: list[list[int]], shown: "Shown") -> list[Generated]:
        """The answers; until there is text, a sign that something happens."""
        with waiting("reading the prompt; the first time, programs are compiled") as over:

            def add(row: int, tokens: list[int]) -> None:
                if shown.live:
                    over()
                shown.add(row, tokens)

            return model.generate(prompts, **self.sampling, on_tokens=add)


def answer(
    options: Options,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    json_file: str | None,
) -> int:
    """Generate from all prompts at once; the exit status.

    One prompt's text is written as it comes, several follow one another at the end.
    """
    given = [one.encode(tokenizer, options.model, options.thinking) for one in prompts]
    started = time.perf_counter()
    with HostPeak() as host:
        model = options.load()
    load_s = time.perf_counter() - started
    quiet = json_file == "-"
    shown = Shown(tokenizer, options.sampling["stop_strings"], live=not quiet and len(given) == 1)
    found = options.generate(model, given, shown)
    if len(given) == 1:
        shown.finish(found[0])
    elif not quiet:
        for one, result in zip(prompts, found, strict=True):
            click.echo(f"── {one.where}", err=True)
            click.echo(text_of(result))
    summarise(found)
    if json_file:
        result = {
            "environment": environment(),
            "model": options.model,
            "weights": options.weights,
            "sampling": options.sampling,
            "load_s": load_s,
            "load_host_peak_bytes": host.bytes,
            "device_peak_bytes": peak_bytes(),
            "results": [
                {"prompt": one.where, "prompt_tokens": ids, **dataclasses.asdict(result)}
                for one, ids, result in zip(prompts, given, found, strict=True)
            ],
        }
        data = (json.dumps(finite(result), indent=1, ensure_ascii=False) + "\n").encode()
        if quiet:
            click.echo(data, nl=False)
        else:
            write_atomically(json_file, data)
    return INTERRUPTED if any(result.finish == "interrupted" for result in found) else 0


def talk(options: Options, tokenizer: Tokenizer, lines: Iterable[bytes]) -> int:
    """A conversation: a line is the user's turn, the answer is written as it comes.

    It ends with the lines, status 0, or with Ctrl-C.
    """
    tokenizer.chat([{"role": "user", "content": "."}], thinking=options.thinking)
    model = options.load()
    messages: list[Message] = []
    for line in _asked(lines):
        text = valid(line.decode("utf-8", "surrogateescape").strip(), "standard input")
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        ids = Prompt("standard input", messages=messages).encode(
            tokenizer, options.model, options.thinking
        )
        shown = Shown(tokenizer, options.sampling["stop_strings"])
        (result,) = options.generate(model, [ids], shown)
        shown.finish(result)
        summarise([result])
        if result.finish == "interrupted":
            return INTERRUPTED
        messages.append({"role": "assistant", "content": result.text})
    return 0


def _asked(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines, each after a sign on a terminal."""
    source = iter(lines)
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False, err=True)
        line = next(source, None)
        if line is None:
            return
        yield line


class Shown:
    """The text of one row on standard output while its tokens come; ids without a tokenizer.

    Nothing is shown unless ``live``.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str], *, live: bool = True
    ) -> None:
        self._stream = tokenizer.stream() if tokenizer else None
        self._stop, self.live = StopStrings(stops), live
        self._written = ""

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """Tokens of a row, the next ones; of the first row they are written."""
        if row or not self.live:
            return
        for token in tokens:
            text = self._stream.push(token) if self._stream else f"{token} "
            self._put(self._stop.push(text))

    def finish(self, result: Generated) -> None:
        """What is left of the text, and the end of the line."""
        if self.live:
            text = text_of(result)
            if text.startswith(self._written):
                self._put(text[len(self._written) :])
            click.echo()

    def _put(self, text: str) -> None:
        self._written += text
        if text:
            click.echo(text, nl=False)


def text_of(result: Generated) -> str:
    """Its text; its token ids without a tokenizer."""
    return " ".join(map(str, result.tokens)) if result.text is None else result.text


def summarise(found: Sequence[Generated]) -> None:
    """One line on standard error: tokens, times, and why each row ended."""
    count, times = sum(len(result.tokens) for result in found), found[0].timings
    ends = ", ".join(dict.fromkeys(result.finish for result in found))
    rate = times.tokens_per_second
    then = "" if rate is None else f", then {rate:.1f} a second"
    line = f"{count} tokens, {times.prefill:.2f} s to the first{then}; {ends}"
    click.echo(line, err=True)
