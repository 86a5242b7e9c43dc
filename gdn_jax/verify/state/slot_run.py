"""Sequences in the slots of a pool, and what decoding their tokens from the start gives."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax.layer.compose import decode_step
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState, init_state
from gdn_jax.report.metrics import unequal
from gdn_jax.serving.bank import LayerBank
from gdn_jax.serving.drafts import DraftRecord
from gdn_jax.serving.pool import StatePool
from gdn_jax.verify.draw import draw_inputs
from gdn_jax.verify.layer.device_run import device_params
from gdn_jax.verify.subject import Subject

ROWS, SLOTS, LAYERS, LAYER = 4, 8, 2, 1
"""Of a batch, of a pool, of its stack, and the layer that is stepped."""
TOKENS = 16
"""A token is a number below this, the row of ``inputs`` that stands for it."""
IDLE = -1
Ids = Any
"""Slots, tokens or counts: a list or an array."""
Words = tuple[int, ...]
"""The tokens of a sequence."""
Held = tuple[np.ndarray, np.ndarray]
"""S [HV, K, V] and the history [W-1, C] of one slot, on the host."""
Records = dict[int, DraftRecord]
Found = tuple[float, str]
"""A check's value and detail."""

PROMPTS: tuple[Words, ...] = ((0, 1), (2, 3, 4), (5,), (6, 7))
PREFIX = PROMPTS[1]

_decode_step = jax.jit(decode_step, static_argnames=("cfg", "backend"))
_step = jax.jit(LayerBank.step_slots, static_argnames=("layer", "backend"))
_draft = jax.jit(LayerBank.draft_slots, static_argnames=("layer", "scheme", "backend"))
_commit = jax.jit(StatePool.commit)


@dataclasses.dataclass(frozen=True)
class SlotRun:
    """A layer in ``bank``, drawn ``inputs`` [TOKENS, D], and the backend to run on.

    Batches have ROWS rows, idle ones among them, for a row's bits depend on their number.
    ``stack`` is the number of layers of the whole stack.
    """

    bank: LayerBank
    params: GDNParams
    inputs: np.ndarray
    stack: int
    backend: str | None
    layer: int = LAYER

    @classmethod
    def of(cls, subject: Subject, stack: int, backend: str | None) -> "SlotRun":
        """The subject's weights, in layer LAYER of a small stack."""
        params = device_params(subject.weights)
        bank = LayerBank(subject.cfg, LAYERS).preload(LAYER, params)
        return cls(bank, params, draw_inputs(subject.cfg, TOKENS, 0), stack, backend)

    @property
    def draft_tokens(self) -> int:
        """Td = W + 1, more than a history holds."""
        return self.bank.cfg.conv_width + 1

    @property
    def trees(self) -> np.ndarray:
        """Parents [ROWS, Td]: two children a node, two chains side by side, a comb, a chain."""
        t = np.arange(self.draft_tokens)
        rows = ((t - 1) // 2, np.maximum(t - 2, -1), t - 1 - t % 2, t - 1)
        return np.stack(rows).astype(np.int32)

    def tokens(self, seed: int = 0) -> np.ndarray:
        """Draft tokens [ROWS, Td], other ones in every row."""
        b, t = np.arange(ROWS)[:, None], np.arange(self.draft_tokens)
        return (5 * b + 3 * t + seed) % TOKENS

    def start(self, prompts: Sequence[Words]) -> tuple[StatePool, list[int]]:
        """A pool, and the slots of it in which up to ROWS prompts were decoded."""
        pool, new = StatePool.create(self.bank.cfg, LAYERS, SLOTS).alloc(len(prompts))
        taken = np.asarray(new).tolist()
        return self.decode(pool, taken, prompts), taken

    def decode(self, pool: StatePool, slots: Sequence[int], prompts: Sequence[Words]) -> StatePool:
        """Up to ROWS sequences moved on by their prompts, which may differ in length."""
        for t in range(max(map(len, prompts))):
            going = [slot if t < len(p) else IDLE for slot, p in zip(slots, prompts, strict=True)]
            rows = [*going, *[IDLE] * (ROWS - len(going))]
            _, pool = self.step(pool, rows, _column(prompts, t))
        return pool

    def step(
        self, pool: StatePool, slots: Ids, tokens: Ids, write: Ids = None
    ) -> tuple[np.ndarray, StatePool]:
        """A token [B] of every row, and its output [B, D]."""
        write = slots if write is None else write
        x = self.inputs[np.asarray(tokens)]
        y, pool = _step(
            self.bank,
            pool,
            self.layer,
            x,
            int32(slots),
            write_slots=int32(write),
            backend=self.backend,
        )
        return np.asarray(y), pool

    def draft(
        self,
        pool: StatePool,
        slots: Ids,
        tokens: Ids,
        scheme: str,
        *,
        lengths: Ids = None,
        parents: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Records]:
        """Draft tokens [B, Td] of every row; a token that is IDLE stands for an input of NaN."""
        tokens = np.asarray(tokens)
        xs = np.where((tokens == IDLE)[..., None], np.float32(np.nan), self.inputs[tokens])
        ys, record = _draft(
            self.bank,
            pool,
            self.layer,
            xs,
            int32(slots),
            lengths=int32([tokens.shape[1]] * ROWS if lengths is None else lengths),
            parents=parents,
            scheme=scheme,
            backend=self.backend,
        )
        return np.asarray(ys), {self.layer: record}

    def commit(self, pool: StatePool, records: Records, slots: Ids, accepted: Ids) -> StatePool:
        """The pool after as many tokens of the draft as each row accepted."""
        return _commit(pool, records, int32(slots), int32(accepted))

    def differences(
        self,
        pool: StatePool,
        slots: Sequence[int],
        sequences: Sequence[Words],
        ys: Iterable[np.ndarray] = (),
    ) -> int:
        """Unequal elements of slots, and of outputs, to serial decoding of up to ROWS sequences.

        Row b of ``ys``, where given, is what the last n tokens of sequence b gave, [n, D].
        """
        outputs, states = self._serial(sequences)
        found = (slot_state(pool, self.layer, slot) for slot in slots)
        count = sum(unequal_states(*pair) for pair in zip(found, states, strict=True))
        for y, expected in zip(ys, outputs, strict=False):
            count += unequal(y, expected[len(expected) - len(y) :])
        return count

    def _serial(self, sequences: Sequence[Words]) -> tuple[list[np.ndarray], list[Held]]:
        """Outputs and last states by :func:`gdn_jax.decode_step` from zeros, without any slot."""
        cfg = self.bank.cfg
        state = init_state(cfg, ROWS)
        ys = [np.zeros((len(words), cfg.d_model), np.float32) for words in sequences]
        last = [_row(state, b) for b in range(len(sequences))]
        for t in range(max(map(len, sequences))):
            x = self.inputs[_column(sequences, t)]
            y, state = _decode_step(self.params, state, x, cfg, backend=self.backend)
            for b, words in enumerate(sequences):
                if t < len(words):
                    ys[b][t], last[b] = y[b], _row(state, b)
        return ys, last


def grown(words: Words, tokens: np.ndarray) -> Words:
    """A sequence with more tokens at its end."""
    return (*words, *tokens.tolist())


def slot_state(pool: StatePool, layer: int, slot: int) -> Held:
    """What one slot holds of one layer."""
    return np.asarray(pool.S[layer, slot]), np.asarray(pool.conv_hist[layer, slot])


def unequal_states(a: Held, b: Held) -> int:
    """Elements of S and of the history that differ in any bit."""
    return sum(unequal(x, y) for x, y in zip(a, b, strict=True))


def changed(before: StatePool, after: StatePool, slots: Sequence[int] = ()) -> int:
    """Elements that differ anywhere but in these slots of layer LAYER."""
    return unequal_states(_blanked(before, slots), _blanked(after, slots))


def spoilt(pool: StatePool, *, keep: Sequence[int]) -> StatePool:
    """NaN everywhere but in these slots of layer LAYER."""

    def spoil(x: jax.Array) -> jax.Array:
        kept = jnp.zeros((LAYERS, x.shape[1]), bool).at[LAYER, int32(keep)].set(True)
        return jnp.where(kept.reshape(*kept.shape, *[1] * (x.ndim - 2)), x, jnp.nan)

    return dataclasses.replace(pool, S=spoil(pool.S), conv_hist=spoil(pool.conv_hist))


def int32(x: Ids) -> np.ndarray:
    """An operand of a compiled program."""
    return np.asarray(x, np.int32)


def _column(sequences: Sequence[Words], t: int) -> np.ndarray:
    """Token t of every row, 0 where there is none."""
    tokens = [words[t] if t < len(words) else 0 for words in sequences]
    return np.array(tokens + [0] * (ROWS - len(tokens)))


def _row(state: GDNState, b: int) -> Held:
    return np.asarray(state.S[b]), np.asarray(state.conv_hist[b])


def _blanked(pool: StatePool, slots: Sequence[int]) -> Held:
    S, hist = np.array(pool.S), np.array(pool.conv_hist)
    for x in (S, hist):
        x[LAYER, int32(slots)] = 0
    return S, hist
