"""A model ready for use: its weights, how they run, and its tokenizer if it has one."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax._core.backend import device_reason
from gdn_jax.errors import GenerationError
from gdn_jax.models.cache import ModelCache, check_room
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.forward import forward_by_block
from gdn_jax.models.generation import device
from gdn_jax.models.generation.host import Generated, OnTokens, Request, generate
from gdn_jax.models.generation.sampling import Sampling
from gdn_jax.models.generation.tokenizer import Tokenizer
from gdn_jax.models.kernels import lay_out
from gdn_jax.models.loading.load import Progress, config_of, load_params
from gdn_jax.models.loading.memory import explained
from gdn_jax.models.params import ModelParams
from gdn_jax.models.route import Call, Route, weights_of
from gdn_jax.types import Array

ROOM_UNIT = 256
"""By default a cache has room for a multiple of this many tokens: few sizes to compile for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Weights and how they run. The methods are called on the host: they compile and check.

    ``tokenizer`` is None where the checkpoint has none; ``kv_dtype`` is the type of keys and
    values: float32 for a float32 model, else bfloat16.
    """

    params: ModelParams
    cfg: ModelConfig
    route: Route
    kv_dtype: Any
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(
        cls,
        params: ModelParams,
        cfg: ModelConfig,
        *,
        backend: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Self:
        """A model of these weights; where the kernels run, int4 weights are laid out and used up.

        Raises:
            UnknownNameError, BackendUnavailableError: as :func:`gdn_jax.decode_step`.
        """
        wide = all(getattr(w, "dtype", None) == jnp.float32 for w in weights_of(params))
        dtype = jnp.float32 if wide else jnp.bfloat16
        if _laid_out(backend):
            params = lay_out(params)
        return cls(params, cfg, Route.choose(params, cfg, backend, dtype), dtype, tokenizer)

    @property
    def backend(self) -> str:
        """What runs a decode step, ``"pallas"`` or ``"xla"``."""
        return self.route.backend

    def logits(self, tokens: Any) -> Array:
        """float32 [B, T, vocab] of token ids [B, T], from an empty cache.

        Raises:
            GenerationError: ``tokens`` is empty, or not whole numbers [B, T] of the vocabulary.
            DeviceMemoryError: the device has too little memory.
        """
        where = "Model.logits"
        ids = _array(where, "tokens", tokens)
        if ids.ndim != 2 or ids.size == 0:
            needed = "needed token ids [B, T], B and T at least 1"
            raise GenerationError(f"{where}: tokens has shape {ids.shape}; {needed}")
        prompts = [self._checked(where, f"row {b}", row) for b, row in enumerate(ids)]
        B, T = ids.shape
        with self._explained(where, B, T, logits=4 * B * T * self.cfg.vocab_size):
            cache, parts = self._cache(B, T), []
            for start, width in device.pieces_of([T] * B, T):
                piece, lengths = device.padded(prompts, start, width)
                call = self._call(reach=device.reach_of(start + width, T), fresh=start == 0)
                y, cache = forward_by_block(self.params, cache, piece, lengths, call)
                parts.append(y[:, : T - start])
            return jnp.concatenate(parts, axis=1)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
        context: int | None = None,
    ) -> list[Generated]:
        """What follows each prompt; all of them run together, each as if it were alone.

        Equal arguments give equal tokens. A row's logits are those of a run with its prompt alone
        up to the order of float32 sums (1e-5 of the largest logit; with bfloat16 products, their
        rounding), so its tokens are the same unless two logits are that close. Its random draws
        depend only on the seed, its place among the prompts and the position.

        Args:
            prompts: token ids, or texts where there is a tokenizer.
            max_new_tokens: the most tokens of each answer.
            temperature, top_k, top_p, repetition_penalty, seed: see
                :class:`gdn_jax.models.generation.sampling.Sampling`.
            stop_tokens: ids that end a row and are not part of it; the checkpoint's by default.
            stop_strings: texts that end a row, even across tokens; needs a tokenizer. The tokens
                include the one that completes the string; the text ends before the string.
            on_tokens: called with a row's number and its new tokens while the device runs on.
            context: tokens that a row has room for; by default as many as are needed.

        Raises:
            GenerationError: no prompts, an empty one, a token that is not in the vocabulary, text
                without a tokenizer, a setting out of range, or too little room. Nothing has run.
            DeviceMemoryError: the device has too little memory.
        """
        where = "Model.generate"
        sampling = Sampling.of(temperature, top_k, top_p, repetition_penalty, seed)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            needed = "needed a whole number from 1 up"
            raise GenerationError(f"{where}: max_new_tokens is {max_new_tokens!r}; {needed}")
        if isinstance(prompts, str) or len(prompts) == 0:
            found = "one text" if isinstance(prompts, str) else "no prompts"
            raise GenerationError(f"{where}: prompts is {found}; needed a list of at least one")
        if stop_strings and self.tokenizer is None:
            raise GenerationError(f"{where}: stop strings need a tokenizer; the model has none")
        rows = [self._encoded(where, f"prompt {i}", p) for i, p in enumerate(prompts)]
        if stop_tokens is None:
            stop_tokens = self.tokenizer.stop_tokens if self.tokenizer else ()
        room = -(-(max(map(len, rows)) + max_new_tokens) // ROOM_UNIT) * ROOM_UNIT
        if context is not None:
            room = context
            for i, row in enumerate(rows):
                what = f"prompt {i} of {len(row)} tokens with {max_new_tokens} new ones"
                check_room(where, len(row) + max_new_tokens, room, what)
        request = Request(
            prompts=rows,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=tuple(int(t) for t in stop_tokens),
            stop_strings=tuple(stop_strings),
            room=room,
            on_tokens=on_tokens,
        )
        with self._explained(where, len(rows), room):
            cache = self._cache(len(rows), room)
            return generate(self.params, self._call(), cache, request, self.tokenizer)

    def _cache(self, batch: int, room: int) -> ModelCache:
        return ModelCache.zeros(self.cfg, batch, room, self.kv_dtype)

    def _call(self, **options: Any) -> Call:
        return Call(self.cfg, self.route, **options)

    def _encoded(self, where: str, name: str, prompt: Any) -> np.ndarray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise GenerationError(f"{where}: {name} is text; without a tokenizer: token ids")
            prompt = self.tokenizer.encode(prompt)
        return self._checked(where, name, _array(where, name, prompt))

    def _checked(self, where: str, name: str, ids: np.ndarray) -> np.ndarray:
        """int32 [T] of the vocabulary, T at least 1."""
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            found = f"shape {ids.shape} and dtype {ids.dtype}"
            raise GenerationError(f"{where}: {name} has {found}; needed a list of token ids")
        if ids.size == 0:
            raise GenerationError(f"{where}: {name} is empty; needed at least one token")
        bad = np.flatnonzero((ids < 0) | (ids >= self.cfg.vocab_size))
        if bad.size:
            found = f"{name} has token {ids[bad[0]]} at {bad[0]}"
            raise GenerationError(f"{where}: {found}; needed 0 to {self.cfg.vocab_size - 1}")
        return ids.astype(np.int32)

    def _explained(self, where: str, batch: int, room: int, **more: int) -> Any:
        cache = jax.eval_shape(lambda: self._cache(batch, room))
        new = {f"cache for {batch} rows of {room} tokens": cache.nbytes} | more
        advice = "weights='q4', a smaller context, or fewer prompts at once"
        return explained(where, {"weights": self.params.nbytes}, new, advice)


def _laid_out(backend: str | None) -> bool:
    """Whether int4 is laid out for the kernels: if they run here and ``backend`` allows them."""
    return backend != "xla" and device_reason() is None


def _array(where: str, name: str, ids: Any) -> np.ndarray:
    try:
        return np.asarray(ids)
    except ValueError:
        raise GenerationError(f"{where}: {name} has rows of different lengths") from None


def load(
    source: str | os.PathLike[str],
    weights: str = "bf16",
    backend: str | None = None,
    *,
    progress: Progress | None = None,
    notes: Callable[[str], None] | None = None,
) -> Model:
    """A model from a Hugging Face directory or a GGUF file.

    Args:
        source: the directory or the file; the tokenizer is that of the directory.
        weights: ``"bf16"``, ``"q4"`` or ``"f32"``: how the large matrices are held; see
            :func:`gdn_jax.models.loading.load.load_params`. Small tensors are float32.
        backend: what runs decode steps, ``"pallas"`` or ``"xla"``; None takes the kernels where
            they run.
        progress, notes: as for ``load_params``.

    Raises:
        CheckpointError, ConfigError: the model cannot be loaded; the message says why.
        TextError: a damaged tokenizer.
        UnknownNameError, BackendUnavailableError: as :func:`gdn_jax.decode_step`.
        DeviceMemoryError: the device has too little memory.
    """
    cfg = config_of(source)
    options = {"weights": weights, "progress": progress, "notes": notes}
    params = load_params(source, cfg, kernel=_laid_out(backend), **options)
    folder = Path(source)
    tokenizer = Tokenizer.load(folder if folder.is_dir() else folder.parent)
    return Model.of(params, cfg, backend=backend, tokenizer=tokenizer)
