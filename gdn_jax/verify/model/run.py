"""A model as verify runs it: pieces of tokens, ragged rows, and single layers on given inputs."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.layer.params import GDNParams
from gdn_jax.models.blocks import embed, full_block, head, linear_block
from gdn_jax.models.cache import ModelCache
from gdn_jax.models.forward import compiled, forward_by_block
from gdn_jax.models.generation.device import padded
from gdn_jax.models.model import Model
from gdn_jax.models.params import ModelParams
from gdn_jax.models.residual import whole
from gdn_jax.models.route import Call
from gdn_jax.report.metrics import distance
from gdn_jax.report.record import Row

LIMIT = 1e-5
"""transformers' own prefill is 9e-6 from its own steps on the bundled checkpoint."""
WIDTH, ROOM = 72, 256
"""Tokens at once where there are several, and of a cache: few programs for many cases."""


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """A model, and what transformers computes: ``ids``, their ``logits``, and more by name."""

    model: Model
    expected: Mapping[str, np.ndarray]

    def replace(self, params: ModelParams) -> "ModelRun":
        """The same with other weights."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, params=params))

    def walk(self, ids: np.ndarray, cuts: Sequence[int]) -> np.ndarray:
        """Logits [T, vocab] of one row whose tokens run in pieces that begin at the cuts.

        Pieces of more than a token, up to WIDTH, are padded to that.
        """
        ends = (*cuts, len(ids))
        cache, parts = self._cache(1), []
        for start, end in zip((0, *cuts), ends, strict=True):
            y, cache = self._run(cache, [ids[start:end]])
            parts.append(y[0])
        return np.concatenate(parts)

    def rows(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Logits [T + 1, vocab] of every row: its tokens at once, and a step of the first again."""
        cache = self._cache(len(prompts))
        y, cache = self._run(cache, prompts)
        z, _ = self._run(cache, [ids[:1] for ids in prompts])
        return [np.concatenate(pair) for pair in zip(y, z, strict=True)]

    def _run(
        self, cache: ModelCache, rows: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], ModelCache]:
        """The logits of every row's next tokens."""
        step = max(map(len, rows)) == 1
        tokens, lengths = padded(rows, 0, 1 if step else WIDTH)
        call = Call(self.model.cfg, self.model.route)
        given = None if step else lengths
        y, cache = forward_by_block(self.model.params, cache, tokens, given, call)
        return [np.asarray(y[b, : len(ids)]) for b, ids in enumerate(rows)], cache

    def generate(
        self, prompts: Sequence[np.ndarray], new: int, **sampling: Any
    ) -> list[np.ndarray]:
        """The tokens that the model's own ``generate`` puts behind each prompt."""
        found = self.model.generate(
            [ids.tolist() for ids in prompts], max_new_tokens=new, stop_tokens=(), **sampling
        )
        return [np.asarray(one.tokens, np.int32) for one in found]

    def _cache(self, batch: int) -> ModelCache:
        return ModelCache.zeros(self.model.cfg, batch, ROOM)

    def layers(self, ids: np.ndarray) -> list[Row]:
        """A row of the embedding, of every layer and of the head, each on transformers' input.

        So an error stays in the part that makes it. ``expected`` has ``hidden`` [L + 1, T, D].
        """
        cfg, hidden = self.model.cfg, self.expected["hidden"]
        found = self._parts(ids, hidden)
        names = ["embedding", *(f"layer {i}" for i in range(len(cfg.layer_types))), "head"]
        wanted = [*hidden, self.expected["logits"][: len(ids)]]
        kinds = ["", *cfg.layer_types, ""]
        rows = []
        for name, kind, x, y in zip(names, kinds, found, wanted, strict=True):
            apart = distance(x, y)
            values = {"max_rel": apart.max_rel, "rms_rel": apart.rms_rel}
            ok = apart.max_rel <= LIMIT
            rows.append({"part": name, "kind": kind, **values, "limit": LIMIT, "ok": ok})
        return rows

    def _parts(self, ids: np.ndarray, hidden: np.ndarray) -> list[np.ndarray]:
        """The embedding, what each layer makes of its ``hidden``, and logits of the last one."""
        params, cache, run, T = self.model.params, self._cache(1), compiled(True), len(ids)
        call = Call(self.model.cfg, self.model.route)
        tokens, lengths = padded([ids], 0, WIDTH)
        states, kv, found = cache.states, zip(cache.k, cache.v, strict=True), []
        linear = itertools.count()

        def given(i: int) -> jax.Array:
            return jnp.asarray(np.pad(hidden[i], ((0, WIDTH - T), (0, 0)))[None])

        found.append(run(embed)(params.embedding, tokens))
        for i, block in enumerate(params.blocks):
            if isinstance(block.mixer, GDNParams):
                states, y = run(linear_block)(states, given(i), block, next(linear), lengths, call)
            else:
                _, y = run(full_block)(next(kv), given(i), block, cache.length, lengths, call)
            found.append(whole(y))
        weight = params.embedding if params.head is None else params.head
        found.append(run(head)(params.norm, weight, given(-1), lengths, call))
        return [np.asarray(x[0, :T]) for x in found]


def verdict(rows: list[Row]) -> tuple[float, float, str]:
    """Value, limit and detail of a check of these rows: the worst, and the first that departs."""
    worst = max(rows, key=lambda row: row["max_rel"])
    departed = [row for row in rows if not row["ok"]]
    detail = f"{len(rows)} parts, each on transformers' input; worst: {_named(worst)}"
    if departed:
        detail = f"{_named(departed[0])} departs first, {len(departed)} of {len(rows)} parts do"
    return worst["max_rel"], LIMIT, detail


def _named(row: Row) -> str:
    return f"{row['part']} ({row['kind']})" if row["kind"] else row["part"]
