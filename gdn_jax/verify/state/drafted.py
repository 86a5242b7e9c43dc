"""Drafts in the slots of a pool against decoding the accepted tokens one by one."""

import numpy as np

from gdn_jax.report.metrics import unequal
from gdn_jax.serving.drafts import SCHEMES
from gdn_jax.verify.state.slot_run import (
    IDLE,
    PREFIX,
    PROMPTS,
    ROWS,
    Found,
    SlotRun,
    changed,
    grown,
)


def fork_commit(this: SlotRun) -> Found:
    """Branches of a prefix that draft different tokens: all commit, or one and the prefix is it."""
    pool, (prefix,) = this.start([PREFIX])
    pool, new = pool.fork(prefix, ROWS)
    branches, tokens = np.asarray(new).tolist(), this.tokens()
    accepted, one = [this.draft_tokens, 1, 3, this.draft_tokens - 1], 2
    count = 0
    for scheme in SCHEMES:
        for parents in (None, this.trees):
            ys, records = this.draft(pool, branches, tokens, scheme, parents=parents)
            tree = np.stack([this.trees[-1]] * ROWS) if parents is None else parents
            paths = [_path_to(tree[b], n - 1) for b, n in enumerate(accepted)]
            sequences = [grown(PREFIX, tokens[b][path]) for b, path in enumerate(paths)]
            outputs = [ys[b][path] for b, path in enumerate(paths)]
            every = this.commit(pool, records, branches, accepted)
            count += this.differences(every, branches, sequences, outputs)
            count += changed(pool, every, branches)
            taken = [n if b == one else 0 for b, n in enumerate(accepted)]
            chosen = this.commit(pool, records, branches, taken)
            count += changed(pool, chosen, branches[one : one + 1])
            kept = chosen.copy(branches[one], prefix).free(branches)
            count += this.differences(kept, [prefix], sequences[one : one + 1])
    detail = f"{ROWS} branches, chains and trees of {this.draft_tokens} tokens, both schemes"
    return count, detail


def ragged(this: SlotRun) -> Found:
    """Draft lengths and accepted counts that differ by row, twice, then a step."""
    most = this.draft_tokens
    rounds = [([most, 1, 3, 0], [most, 1, 0, 0]), ([2, min(4, most), 3, most], [0, 2, 3, 1])]
    count = 0
    for scheme in SCHEMES:
        pool, slots = this.start(PROMPTS)
        sequences = list(PROMPTS)
        for seed, (lengths, accepted) in enumerate(rounds):
            tokens = this.tokens(seed)
            ys, records = this.draft(pool, slots, tokens, scheme, lengths=lengths)
            pool = this.commit(pool, records, slots, accepted)
            sequences = [grown(s, tokens[b][: accepted[b]]) for b, s in enumerate(sequences)]
            outputs = [ys[b][:n] for b, n in enumerate(accepted)]
            count += this.differences(pool, slots, sequences, outputs)
            count += sum(int(np.count_nonzero(ys[b][n:])) for b, n in enumerate(lengths))
        last = this.tokens(len(rounds))[:, :1]
        y, pool = this.step(pool, slots, last[:, 0])
        sequences = [grown(s, last[b]) for b, s in enumerate(sequences)]
        count += this.differences(pool, slots, sequences, y[:, None])
    said = "; then ".join(f"{accepted} of {lengths}" for lengths, accepted in rounds)
    return count, f"accepted {said}; then a step; both schemes, W = {most - 1}"


def one_token(this: SlotRun) -> Found:
    """A draft of one token, committed, against a step."""
    pool, slots = this.start(PROMPTS)
    tokens = this.tokens()[:, :1]
    y, stepped = this.step(pool, slots, tokens[:, 0])
    count = 0
    for scheme in SCHEMES:
        ys, records = this.draft(pool, slots, tokens, scheme)
        count += unequal(ys[:, 0], y)
        count += changed(stepped, this.commit(pool, records, slots, [1] * ROWS))
    return count, "output and whole pool, both schemes"


def rejected(this: SlotRun) -> Found:
    """Drafts of which nothing is accepted, and rejected tokens that are not finite."""
    pool, slots = this.start(PROMPTS)
    tokens = this.tokens()
    spoilt_tokens = np.where(np.arange(this.draft_tokens) < 1, tokens, IDLE)
    sequences = [grown(s, tokens[b][:1]) for b, s in enumerate(PROMPTS)]
    count = 0
    for scheme in SCHEMES:
        _, records = this.draft(pool, slots, tokens, scheme)
        count += changed(pool, this.commit(pool, records, slots, [0] * ROWS))
        _, records = this.draft(pool, slots, spoilt_tokens, scheme)
        count += changed(pool, this.commit(pool, records, slots, [0] * ROWS))
        moved = this.commit(pool, records, slots, [1] * ROWS)
        count += this.differences(moved, slots, sequences)
    return count, "none accepted; one accepted before inputs of NaN; both schemes"


def _path_to(parents: np.ndarray, node: int) -> list[int]:
    """The tokens of a draft from its start to one of them."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]
