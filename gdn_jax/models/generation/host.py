"""Generation as the host runs it: it reads some tokens while the device computes the next ones.

Each arrow down starts a loop of 8 tokens, each arrow up is a copy that the host waits for. After
the first, a loop is started before the tokens of the one before it are read, so the device has work
while the host decodes text, looks for stop strings and calls ``on_tokens``::

    host      prefill  first           start 1  start 2  read 1, text  start 3  read 2, text ...
                 |       |  ^             |        |        ^             |        ^
                 v       v  |             v        v        |             v        |
    device    [prompt pieces][token]     [  loop 1  ][  loop 2  ........][  loop 3  ..........

So the host learns one loop late that a row stops by its text; the tokens that the device chose
after that are dropped. A stop token ends a row on the device itself: see
:mod:`gdn_jax.models.generation.device`.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from gdn_jax.models.cache import ModelCache
from gdn_jax.models.generation import device
from gdn_jax.models.generation.sampling import Sampling
from gdn_jax.models.generation.stopping import StopStrings
from gdn_jax.models.generation.tokenizer import Tokenizer
from gdn_jax.models.params import ModelParams
from gdn_jax.models.route import Call

LOOK = 8
"""Tokens of a row in one loop, after which the host reads them."""
OnTokens = Callable[[int, list[int]], Any]


@dataclasses.dataclass(frozen=True)
class Timings:
    """Times of all rows of a call together.

    ``prefill`` is the seconds until the first token, ``decode`` those after it; both include what
    was compiled meanwhile. ``tokens_per_second`` counts from when the host has read the first loop
    of tokens, and so leaves out its compilation; it is None where no tokens follow that loop.
    """

    prefill: float
    decode: float
    tokens_per_second: float | None

    @classmethod
    def of(cls, began: float, looks: Sequence[tuple[float, int]]) -> Self:
        """From each time at which the host read tokens, and how many it had then; at least one."""
        (first, _), (last, tokens) = looks[0], looks[-1]
        rate = None
        if len(looks) > 2:
            start, before = looks[1]
            rate = (tokens - before) / (last - start)
        return cls(first - began, last - first, rate)


@dataclasses.dataclass(frozen=True)
class Generated:
    """The answer to one prompt.

    ``tokens`` leaves out the stop token that ended them; ``logprobs`` has the log-probability of
    each under the model's own distribution, however it was chosen. ``text`` ends before a stop
    string; it is None without a tokenizer. ``finish`` is ``"stop"``, ``"length"`` or
    ``"interrupted"``.
    """

    tokens: list[int]
    logprobs: list[float]
    text: str | None
    finish: str
    timings: Timings


@dataclasses.dataclass(frozen=True)
class Request:
    """What ``generate`` is asked for; everything in it has been checked."""

    prompts: Sequence[np.ndarray]
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    stop_strings: tuple[str, ...]
    room: int
    on_tokens: OnTokens | None


class _Row:
    """One answer as it comes."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: str | None = None
        self._request, self._text = request, ""
        self._stream = tokenizer and tokenizer.stream()
        self._stop = StopStrings(request.stop_strings)

    def take(self, token: int, logprob: float) -> bool:
        """Whether the token is part of the answer; sets ``finish`` when it was the last."""
        if token in self._request.stop_tokens:
            self.finish = "stop"
            return False
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self._stream is not None:
            self._text += self._stop.push(self._stream.push(token))
        if self._stop.found is not None:
            self.finish = "stop"
        elif len(self.tokens) == self._request.max_new_tokens:
            self.finish = "length"
        return True

    def done(self, timings: Timings) -> Generated:
        """The answer. Call this once: it also takes the end of the text."""
        text = None
        if self._stream is not None:
            text = self._text + self._stop.push(self._stream.finish()) + self._stop.finish()
        finish = self.finish or "interrupted"
        return Generated(self.tokens, self.logprobs, text, finish, timings)


def generate(
    params: ModelParams, call: Call, cache: ModelCache, request: Request, tokenizer: Any
) -> list[Generated]:
    """The answers to all prompts of a request; ``cache`` must be empty, and is donated.

    ``KeyboardInterrupt``, at any time, ends the answers where they are.
    """
    rows = [_Row(request, tokenizer) for _ in request.prompts]
    began = time.perf_counter()
    looks: list[tuple[float, int]] = []
    try:
        for chosen in _chosen(params, call, cache, request, rows):
            now = time.perf_counter()
            _give(rows, chosen, request.on_tokens)
            looks.append((now, sum(len(row.tokens) for row in rows)))
    except KeyboardInterrupt:
        pass
    timings = Timings.of(began, looks or [(time.perf_counter(), 0)])
    return [row.done(timings) for row in rows]


def _chosen(
    params: ModelParams, call: Call, cache: ModelCache, request: Request, rows: list[_Row]
) -> Iterator[list[np.ndarray]]:
    """Tokens and log-probabilities [n, B] on the host, read while the device computes the next."""
    prompts, B = request.prompts, len(request.prompts)
    stops = np.full(device.bucket(len(request.stop_tokens), 4), -1, np.int32)
    stops[: len(request.stop_tokens)] = request.stop_tokens
    stops = jnp.asarray(stops)
    logits, cache = device.prefill(params, cache, prompts, request.room, call)
    none, left = jnp.zeros(B, jnp.int32), jnp.full(B, request.max_new_tokens, jnp.int32)
    seen = _seen(prompts, logits.shape[-1]) if request.sampling.penalises else None
    state = device.Rows(cache, none, jnp.zeros_like(none), left, seen)
    state, chosen = device.first(state, logits, request.sampling, stops)
    yield [np.asarray(x) for x in chosen]
    waiting: deque[device.Chosen] = deque()
    bound, most = max(map(len, prompts)), max(map(len, prompts)) + request.max_new_tokens
    while any(row.finish is None for row in rows):
        if bound < most - 1:
            bound += LOOK
            reach = device.step_reach(call.route, B, min(bound, most), request.room)
            how = call._replace(reach=reach)
            keep = jnp.asarray([row.finish is None for row in rows])
            state, chosen = device.decode(params, state, keep, request.sampling, stops, how, LOOK)
            for x in chosen:
                x.copy_to_host_async()
            waiting.append(chosen)
            if len(waiting) == 1 and bound < most - 1:
                continue
        yield [np.asarray(x) for x in waiting.popleft()]


def _seen(prompts: Sequence[np.ndarray], vocab: int) -> Any:
    seen = np.zeros((len(prompts), vocab), bool)
    for b, prompt in enumerate(prompts):
        seen[b, prompt] = True
    return jnp.asarray(seen)


def _give(rows: list[_Row], chosen: list[np.ndarray], on_tokens: OnTokens | None) -> None:
    """Give the chosen tokens to the rows that still want them, and then to ``on_tokens``."""
    for b, row in enumerate(rows):
        new = []
        for token, logprob in zip(*(x[:, b].tolist() for x in chosen), strict=True):
            if row.finish is None and token >= 0 and row.take(token, logprob):
                new.append(token)
        if new and on_tokens is not None:
            on_tokens(b, new)
