"""T tokens of one layer: with a host round trip for each, and in one run on the device."""

import functools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax._core.backend import select_backend
from gdn_jax.bench.slope import SHORT, Timing
from gdn_jax.bench.suites.layer import draw_params, kernel_form, sizes
from gdn_jax.bench.workload import Prepared, Workload, poisoned
from gdn_jax.config import GDNConfig
from gdn_jax.report.metrics import unequal
from gdn_jax.serving.bank import LayerBank
from gdn_jax.verify.layer.device_run import bank_decode

TOKENS = 32
TIER = "q4"


def workloads(
    cfg: GDNConfig, batches: Sequence[int], backends: Sequence[str]
) -> Iterator[Workload]:
    """The int4 layer both ways, the time of a token in each; the check counts unequal elements."""
    for batch in batches[:1]:
        for backend in backends:
            yield _workload(cfg, batch, backend, "roundtrip_device")
            yield _workload(cfg, batch, backend, "roundtrip_host")


def _workload(cfg: GDNConfig, batch: int, backend: str, kernel: str) -> Workload:
    _, moved, flops = sizes(cfg, TIER, batch)

    def make() -> Prepared:
        select_backend("decode", cfg, backend=backend)
        params = draw_params(cfg, TIER, jax.random.key(0))
        params = kernel_form(params) if backend == "pallas" else params
        bank = LayerBank(cfg, 1).preload(0, params)
        xs = np.random.default_rng(0).normal(size=(batch, TOKENS, cfg.d_model)).astype(np.float32)
        tokens = jnp.asarray(xs)
        decode = functools.partial(bank_decode, layer=0, backend=backend)
        ys, state = poisoned(decode, bank, bank.init_state(batch), tokens)
        host, other = bank.decode_host(bank.init_state(batch), 0, xs, backend=backend)

        def check() -> float:
            pairs = (np.asarray(ys), host), *zip(*map(jax.tree.leaves, (state, other)), strict=True)
            return sum(unequal(np.asarray(a), np.asarray(b)) for a, b in pairs)

        def host_times(repetitions: int) -> Timing:
            seconds, carry = [], bank.init_state(batch)
            for _ in range(repetitions + SHORT):
                started = time.perf_counter()
                _, carry = bank.decode_host(carry, 0, xs, backend=backend)
                seconds.append(time.perf_counter() - started)
            return Timing.of(seconds[SHORT:], TOKENS)

        def run(carry):
            return decode(bank, carry, tokens)[1]

        measured = host_times if kernel == "roundtrip_host" else None
        detail = f"{TOKENS} host round trips against one device run"
        return Prepared(check, run, bank.init_state(batch), detail, measured)

    unit, shape = "unequal elements", f"t{TOKENS}"
    return Workload(kernel, backend, shape, batch, moved, flops, TOKENS, make, 0, unit)
