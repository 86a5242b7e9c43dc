"""Many tokens at once: the chunked delta rule, its peers, and a whole layer with its parts."""

from collections.abc import Iterator, Sequence

from gdn_jax.bench.peers import chunk_rows
from gdn_jax.bench.suites import prefill_layer
from gdn_jax.bench.suites.chunk import Case, workload
from gdn_jax.bench.workload import Workload
from gdn_jax.config import GDNConfig
from gdn_jax.report.record import Row

TOKENS = (16384, 65536, 4096)
LEAST, MOST = 64, 131072
XLA_TOKENS, F32_TOKENS, PACKED_TOKENS, LAYER_TOKENS = 4096, 16384, 16384, 8192
"""The most tokens: of the XLA form, of float32 operands, of the packed row and of the layer."""
SEQUENCES = 8
"""How many sequences of equal length the packed row has."""


def workloads(cfg: GDNConfig, tokens: Sequence[int], backends: Sequence[str]) -> Iterator[Workload]:
    """Rows of the kernels, of peers on the same operands, of the layer, then of other operands
    and of XLA's form.
    """
    each = [Case(cfg, T) for T in tokens]
    wide = [Case(cfg, T, "float32") for T in tokens if T <= F32_TOKENS]
    part = min(PACKED_TOKENS, max(tokens)) // SEQUENCES
    others = [*wide, Case(cfg, part * SEQUENCES, sequences=SEQUENCES)]
    if "pallas" in backends:
        yield from (workload(case, "pallas") for case in each)
        yield from chunk_rows.workloads(cfg, tokens)
    T = min(LAYER_TOKENS, max(tokens))
    for backend in sorted(backends):
        if backend != "xla" or T <= XLA_TOKENS:
            yield from prefill_layer.workloads(cfg, T, backend)
    if "pallas" in backends:
        yield from (workload(case, "pallas") for case in others)
    if "xla" in backends:
        few = (case for case in (*each, *others) if case.tokens <= XLA_TOKENS)
        yield from (workload(case, "xla") for case in few)


def parts(rows: Sequence[Row]) -> list[Row]:
    """The share that each part, timed by itself, has of its layer's time; None if not timed."""
    timed = {(row["kernel"], row["shape"], row["backend"]): row["us"] for row in rows}
    found: list[Row] = []
    for (kernel, shape, backend), us in timed.items():
        if kernel != prefill_layer.KERNEL or not us:
            continue
        each = {
            part: timed.get((f"{kernel}_{part}", shape, backend)) for part in prefill_layer.PARTS
        }
        shares = {part: part_us and part_us / us for part, part_us in each.items()}
        known = [share for share in shares.values() if share]
        rest = 1 - sum(known) if len(known) == len(each) else None
        found.append({"shape": shape, "backend": backend, "us": us, **shares, "rest": rest})
    return found
