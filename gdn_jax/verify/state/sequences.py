"""Many sequences: slots, batches, drafts and files against decoding each sequence serially."""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from gdn_jax.report.metrics import distance, unequal
from gdn_jax.report.progress import Stage
from gdn_jax.report.record import Report
from gdn_jax.serving.bank import LayerBank
from gdn_jax.serving.drafts import SCHEMES
from gdn_jax.serving.files import load_pool, save_pool
from gdn_jax.serving.pool import StatePool
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.state.drafted import fork_commit, one_token, ragged, rejected
from gdn_jax.verify.state.slot_run import (
    IDLE,
    LAYER,
    PREFIX,
    PROMPTS,
    ROWS,
    SLOTS,
    Found,
    SlotRun,
    changed,
    grown,
    slot_state,
    spoilt,
    unequal_states,
)
from gdn_jax.verify.subject import Subject

BATCH_LIMIT = 1e-6
"""The same products summed in another order."""


def run(
    subject: Subject, report: Report, *, layers: int, backend: str | None, stage: Stage
) -> None:
    """Run every check of the suite and add it to the report."""
    with stage("weights to the device"):
        this = SlotRun.of(subject, layers, backend)
    for name, measure in CHECKS.items():
        with stage(f"state.{name}"):
            value, detail = measure(this)
        limit = BATCH_LIMIT if measure is batch else 0
        report.checks.append(check(f"state.{name}", value, limit, detail))


def isolation(this: SlotRun) -> Found:
    """A sequence while all else is NaN: rows beside it, its branch, free slots, other layers."""
    pool, slots = this.start(PROMPTS[:3])
    own, row = slots[1], 1
    pool, branch = pool.fork(own, 1)
    poisoned = spoilt(pool, keep=[own])
    full, alone = [slots[0], own, slots[2], int(branch[0])], [IDLE, own, IDLE, IDLE]
    count = 0
    for way in ("step", *SCHEMES):
        y, clean = _advance(this, pool, full, way)
        for rows in (full, alone):
            found, after = _advance(this, poisoned, rows, way)
            count += unequal(found[row], y[row])
            count += unequal_states(slot_state(after, LAYER, own), slot_state(clean, LAYER, own))
            count += changed(poisoned, after, [slot for slot in rows if slot != IDLE])
    return count, f"step, draft and commit; NaN in {SLOTS - 1} slots of the layer and in the others"


def recycle(this: SlotRun) -> Found:
    """Slots full of NaN, freed and handed out again, and such that are reset."""
    pool, slots = this.start(PROMPTS)
    pool = spoilt(pool.alloc(SLOTS - ROWS)[0], keep=[])
    again, new = pool.free(slots).alloc(ROWS)
    count = 0
    for clean, at in ((again, np.asarray(new).tolist()), (pool.reset(slots), slots)):
        count += sum(int(np.count_nonzero(x)) for x in clean.export(at).values())
        count += this.differences(this.decode(clean, at, PROMPTS), at, PROMPTS)
    return count, f"{ROWS} slots full of NaN, freed and handed out again, or reset, and decoded in"


def idle(this: SlotRun) -> Found:
    """Rows of slot -1 beside others and by themselves, while slot 0 is live."""
    pool, slots = this.start(PROMPTS)
    full = [slots[3], slots[1], slots[0], slots[2]]
    live = [1, 3]
    some, none = [slot if b in live else IDLE for b, slot in enumerate(full)], [IDLE] * ROWS
    count = 0
    for way in ("step", *SCHEMES):
        y, busy = _advance(this, pool, full, way)
        for rows in (some, none):
            found, after = _advance(this, pool, rows, way)
            going = [b for b in live if rows[b] != IDLE]
            count += int(np.count_nonzero(np.delete(found, going, axis=0)))
            count += unequal(found[going], y[going])
            used = [rows[b] for b in going]
            count += changed(pool, after, used)
            for slot in used:
                now, beside = (slot_state(x, LAYER, slot) for x in (after, busy))
                count += unequal_states(now, beside)
    for read, write in ((none, full), (full, none)):
        y, after = this.step(pool, read, this.tokens()[:, 0], write=write)
        count += int(np.count_nonzero(y)) + changed(pool, after)
    return count, "idle rows beside live ones, alone, and where only one of read and write is idle"


def export_import(this: SlotRun) -> Found:
    """Slots into other slots of another pool, and a pool through a file; then a step of each."""
    pool, slots = this.start(PROMPTS)
    other, _ = StatePool.create(pool.cfg, pool.num_layers, SLOTS).alloc(2)
    other, new = other.alloc(ROWS)
    moved = np.asarray(new).tolist()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pool.safetensors"
        save_pool(file, pool)
        loaded, size = load_pool(file, pool.cfg), file.stat().st_size
    count = 0
    for name, table in vars(pool.table).items():
        count += unequal(np.asarray(table), np.asarray(getattr(loaded.table, name)))
    y, after = this.step(pool, slots, this.tokens()[:, 0])
    for copy, at in ((other.import_(moved, pool.export(slots)), moved), (loaded, slots)):
        found, stepped = this.step(copy, at, this.tokens()[:, 0])
        count += unequal(found, y)
        for was, now in ((pool, copy), (after, stepped)):
            a, b = was.export(slots), now.export(at)
            count += sum(unequal(a[name], b[name]) for name in a)
    return count, f"slots {slots} into {moved} of another pool; a file of {size} bytes"


def prefix(this: SlotRun) -> Found:
    """A prefix that every row reads and none writes, and its checkpoint when it is gone."""
    pool, (source,) = this.start([PREFIX])
    handle = pool.checkpoint(source)
    pool, new = pool.alloc(ROWS)
    branches, tokens = np.asarray(new).tolist(), this.tokens()
    y, after = this.step(pool, [source] * ROWS, tokens[:, 0], write=branches)
    count = changed(pool, after, branches)
    again, after = this.step(after, branches, tokens[:, 1])
    sequences = [grown(PREFIX, row[:2]) for row in tokens]
    count += this.differences(after, branches, sequences, np.stack([y, again], axis=1))
    late, new = after.reset(source).free(source).branch(handle, 2)
    count += this.differences(late, np.asarray(new).tolist(), [PREFIX] * 2)
    return count, f"{ROWS} rows step from one slot into others; 2 branches of its checkpoint"


def batch(this: SlotRun) -> Found:
    """Each row of a batch, output and state, to a batch of its own."""
    pool, slots = this.start(PROMPTS)
    tokens = this.tokens()[:, 0]
    y, after = this.step(pool, slots, tokens)
    worst = 0.0
    for b, slot in enumerate(slots):
        solo, alone = this.step(pool, slots[b : b + 1], tokens[b : b + 1])
        here, there = (slot_state(x, LAYER, slot) for x in (after, alone))
        pairs = ((y[b], solo[0]), *zip(here, there, strict=True))
        worst = max(worst, *(distance(*pair).max_rel for pair in pairs))
    return worst, f"a step of {ROWS} rows, each by itself"


def stack(this: SlotRun) -> Found:
    """The first and the last layer of a whole stack, in the first and the last slot of its pool."""
    layers, prompts = (0, this.stack - 1), PROMPTS[:2]
    bank = LayerBank(this.bank.cfg, this.stack)
    for layer in layers:
        bank = bank.preload(layer, this.params)
    pool, slots = StatePool.create(bank.cfg, this.stack, 3).alloc(3)
    ends = np.asarray(slots).tolist()[::2]
    rows, tokens = [*ends, *[IDLE] * (ROWS - len(ends))], this.tokens()
    accepted = [this.draft_tokens - 1, 2, 0, 0]
    sequences = [grown(p, tokens[b][: accepted[b]]) for b, p in enumerate(prompts)]
    places = [dataclasses.replace(this, bank=bank, layer=layer) for layer in layers]
    outputs, records = [], {}
    for place in places:
        pool = place.decode(pool, ends, prompts)
        ys, record = place.draft(pool, rows, tokens, "replay")
        outputs.append([ys[b][:n] for b, n in enumerate(accepted[: len(ends)])])
        records |= record
    pool = this.commit(pool, records, rows, accepted)
    count = 0
    for place, ys in zip(places, outputs, strict=True):
        count += place.differences(pool, ends, sequences, ys)
    for x in (pool.S, pool.conv_hist):
        filled = np.array(jnp.count_nonzero(x, axis=tuple(range(2, x.ndim))))
        filled[np.ix_(layers, ends)] = 0
        count += int(filled.sum())
    detail = f"layers {layers[0]} and {layers[1]}, slots {ends} of 3; {this.stack - 2} layers zero"
    return count, detail


def _advance(
    this: SlotRun, pool: StatePool, rows: list[int], way: str
) -> tuple[np.ndarray, StatePool]:
    """A step, or a draft by a scheme with all but its last token accepted."""
    tokens = this.tokens()
    if way == "step":
        return this.step(pool, rows, tokens[:, 0])
    ys, records = this.draft(pool, rows, tokens, way)
    return ys, this.commit(pool, records, rows, [this.draft_tokens - 1] * ROWS)


CHECKS: dict[str, Callable[[SlotRun], Found]] = {
    measure.__name__: measure
    for measure in (
        isolation,
        recycle,
        fork_commit,
        ragged,
        idle,
        one_token,
        rejected,
        export_import,
        prefix,
        batch,
        stack,
    )
}
STAGES = 1 + len(CHECKS)
