"""``gdn-jax generate`` and ``gdn-jax perplexity``."""

import sys
from typing import Any

import click

from gdn_jax.cli.options import json_option, writable
from gdn_jax.errors import TextError
from gdn_jax.models.generation.prompts import Prompt, read_prompts
from gdn_jax.models.generation.stopping import StopStrings
from gdn_jax.models.generation.tokenizer import Tokenizer, read_text, valid
from gdn_jax.models.loading.weights import WEIGHTS

model_option = click.option(
    "--model",
    metavar="DIR|FILE.gguf",
    required=True,
    help="A Hugging Face directory of a dense Qwen3.5 model, or a GGUF file of one.",
)
backend_option = click.option(
    "--backend", help="Insist on a backend; by default the best available one."
)


@click.command()
@model_option
@click.option("--prompt", metavar="TEXT", help="Go on from this text.")
@click.option(
    "--prompts",
    metavar="FILE",
    help='Several at once: one a line, or JSON lines if it is named .jsonl: a string, {"prompt": '
    '".."}, {"messages": [..]} or {"tokens": [..]}.',
)
@click.option(
    "--chat",
    is_flag=True,
    help="Put the prompt into the model's chat template; without one, hold a conversation whose "
    "turns are the lines of standard input.",
)
@click.option(
    "--thinking/--no-thinking", default=None, help="What a chat template makes of enable_thinking."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 takes the most likely token.",
)
@click.option(
    "--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 is no limit."
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Divides the score of tokens that are there already; 1 changes nothing.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--stop", "stops", metavar="TEXT", multiple=True, help="End before it; repeatable.")
@click.option("--weights", type=click.Choice(WEIGHTS), default="bf16", show_default=True)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens to make room for, prompt and answer; by default what they need.",
)
@backend_option
@click.option(
    "--json",
    "json_file",
    metavar="FILE|-",
    callback=lambda context, parameter, value: (
        value if value == "-" else writable(context, parameter, value)
    ),
    help="Write token ids, log-probabilities and timings here; - is standard output, which then "
    "has nothing else.",
)
def generate(
    model: str,
    prompt: str | None,
    prompts: str | None,
    chat: bool,
    thinking: bool | None,
    weights: str,
    backend: str | None,
    json_file: str | None,
    **sampling: Any,
) -> int:
    """Text from a model: the answer on standard output, all else on standard error."""
    from gdn_jax.cli.answer import Options, answer, talk
    from gdn_jax.models.loading.load import config_of

    if prompt is not None and prompts is not None:
        raise click.UsageError("--prompt and --prompts exclude each other")
    if prompt is None and prompts is None and not chat:
        raise click.UsageError("nothing to go on from; needed --prompt, --prompts or --chat")
    stops = [valid(text, "--stop") for text in sampling.pop("stops")]
    StopStrings(stops)
    config_of(model)
    tokenizer = Tokenizer.load(model)
    options = Options(model, weights, backend, thinking, sampling | {"stop_strings": stops})
    if prompt is None and prompts is None:
        if json_file:
            raise click.UsageError("a conversation has no --json")
        if tokenizer is None:
            raise TextError(f"{model}: no tokenizer.json there; needed for --chat")
        return talk(options, tokenizer, sys.stdin.buffer)
    found = read_prompts(prompts) if prompts else [Prompt("--prompt", text=prompt)]
    found = [one.as_chat() for one in found] if chat else found
    return answer(options, tokenizer, found, json_file)


@click.command()
@model_option
@click.option("--text", "file", metavar="FILE", required=True, help="A text in UTF-8.")
@click.option(
    "--weights",
    "kinds",
    type=click.Choice(WEIGHTS),
    multiple=True,
    default=("bf16",),
    show_default=True,
    help="Repeatable; each is measured and they stand side by side.",
)
@click.option(
    "--tokens", type=click.IntRange(min=2), metavar="N", help="Only the first N; all by default."
)
@click.option(
    "--context",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens of a window; by default the text is one sequence, with keys and values for all of "
    "it.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens from one window to the next; by default half of --context.",
)
@backend_option
@json_option
def perplexity(
    model: str,
    file: str,
    kinds: tuple[str, ...],
    tokens: int | None,
    context: int | None,
    stride: int | None,
    backend: str | None,
    json_file: str | None,
) -> int:
    """How well a model predicts a text, and what narrower weights cost on it."""
    from gdn_jax.cli.compare import compare
    from gdn_jax.models.loading.load import config_of

    if stride is not None and (context is None or stride >= context):
        raise click.UsageError("--stride goes with a --context that is longer")
    config_of(model)
    tokenizer = Tokenizer.load(model)
    text = read_text(file)
    ids = Prompt(file, text=text).encode(tokenizer, model, None)
    if len(ids) < 2:
        raise TextError(f"{file}: {len(ids)} token; needed at least 2")
    if tokenizer is not None and tokens is not None and tokens < len(ids):
        ids = ids[:tokens]
        text = tokenizer.decode(ids)
    return compare(
        model,
        dict.fromkeys(kinds),
        ids,
        len(text.encode()),
        context=context,
        stride=stride,
        backend=backend,
        json_file=json_file,
    )
