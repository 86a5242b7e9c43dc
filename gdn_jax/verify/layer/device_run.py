"""One layer's run on the device, and the checks that its bits must pass in any tier."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax.config import GDNConfig
from gdn_jax.layer.compose import decode_step, trace_step
from gdn_jax.layer.pallas import params_to_kernel
from gdn_jax.layer.params import GDNParams
from gdn_jax.layer.state import GDNState, init_state
from gdn_jax.layer.trace import trace_shapes
from gdn_jax.report.metrics import unequal
from gdn_jax.report.record import Check, Row
from gdn_jax.serving.bank import LayerBank
from gdn_jax.verify.catalogue import check
from gdn_jax.verify.layer.rows import Traces

REPETITIONS = {"cpu": 3, "gpu": 1000}
"""Of one step; on a CPU one of the 27B shape takes a tenth of a second."""

_trace_step = jax.jit(trace_step, static_argnames=("cfg", "backend"))


@functools.partial(jax.jit, static_argnames=("layer", "backend"), donate_argnames="state")
def bank_decode(
    bank: LayerBank, state: GDNState, xs: jax.Array, layer: int, backend: str | None
) -> tuple[jax.Array, GDNState]:
    """:meth:`LayerBank.decode`, jitted, with the state updated in place."""
    return bank.decode(state, layer, xs, backend=backend)


@functools.partial(jax.jit, static_argnames=("cfg", "backend", "repetitions"))
def unequal_repeats(
    params: GDNParams,
    state: GDNState,
    x: jax.Array,
    cfg: GDNConfig,
    backend: str | None,
    repetitions: int,
) -> jax.Array:
    """Elements in which a step's output and state differ from those of its first repetition."""

    def body(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        first, count = carry
        # Tied to the counter, so that no compiler takes the step out of the loop.
        start, token, _ = lax.optimization_barrier((state, x, i))
        bits = jax.tree.map(
            lambda x: lax.bitcast_convert_type(x, jnp.int32),
            decode_step(params, start, token, cfg, backend=backend),
        )
        first = jax.tree.map(lambda new, kept: jnp.where(i == 0, new, kept), bits, first)
        unlike = jax.tree.map(lambda a, b: jnp.sum(a != b), bits, first)
        return first, count + sum(jax.tree.leaves(unlike))

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), (x, state))
    return lax.fori_loop(0, repetitions, body, (nothing, jnp.int32(0)))[1]


def device_params(weights: Mapping[str, np.ndarray]) -> GDNParams:
    """GDNParams on the default device from host arrays by name."""
    return GDNParams(**{name: jnp.asarray(x) for name, x in weights.items()})


def run_traces(params: GDNParams, cfg: GDNConfig, xs: np.ndarray, backend: str | None) -> Traces:
    """Every operator of every token of one sequence: arrays [T, ..] by read-back name."""
    state = init_state(cfg)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in trace_shapes(cfg)}
    for x in xs:
        _, state, trace = _trace_step(params, state, jnp.asarray(x[None]), cfg=cfg, backend=backend)
        for name, values in rows.items():
            values.append(np.asarray(trace[name])[0])
    return {name: np.stack(values) for name, values in rows.items()}


@dataclasses.dataclass(frozen=True)
class DeviceRun:
    """Layers ``near`` and ``far`` of one stack, the same weights, stepped over the same tokens.

    ``ys`` [T, D] are the outputs of ``near``, ``traces`` its operators from single steps, and
    ``far_ys`` and ``state`` the outputs of ``far`` and the stack's state after both.
    """

    tier: str
    bank: LayerBank
    near: int
    far: int
    tokens: jax.Array
    traces: Traces
    ys: np.ndarray
    far_ys: np.ndarray
    state: GDNState
    backend: str | None

    @classmethod
    def of(
        cls, tier: str, bank: LayerBank, near: int, far: int, xs: np.ndarray, backend: str | None
    ) -> "DeviceRun":
        """Run both layers over xs [T, D], and the near one again with every operator read back."""
        params = bank.layers[near].params("verify", near)
        traces = run_traces(params, bank.cfg, xs, backend)
        tokens = jnp.asarray(xs[None])
        ys, state = bank_decode(bank, bank.init_state(), tokens, near, backend)
        far_ys, state = bank_decode(bank, state, tokens, far, backend)
        outputs = (np.asarray(ys[0]), np.asarray(far_ys[0]))
        return cls(tier, bank, near, far, tokens, traces, *outputs, state, backend)

    def difference(self, ys: np.ndarray, state: GDNState, layer: int) -> int:
        """Elements of an output and of a layer's state that differ in any bit from the traces."""
        count = unequal(ys, self.traces["OUT"])
        count += unequal(np.asarray(state.S[layer, 0]), self.traces["S"][-1])
        return count + unequal(np.asarray(state.conv_hist[layer, 0]), self.traces["HIST"][-1])

    def readback(self) -> Check:
        """The device run against single steps with every operator read back."""
        count = self.difference(self.ys, self.state, self.near)
        return check(f"{self.tier}.readback", count, 0, f"{self.ys.size} outputs, final state")

    def cross_layer(self) -> Check:
        """The far layer against the near one, and zeros wherever nothing was stepped."""
        count = self.difference(self.far_ys, self.state, self.far)
        others = [i for i in range(self.bank.num_layers) if i not in (self.near, self.far)]
        for part in (self.state.S, self.state.conv_hist):
            count += sum(int(jnp.count_nonzero(part[i])) for i in others)
        detail = (
            f"layers {self.near} and {self.far} of one stack: {self.ys.size} outputs and both "
            f"states; {len(others)} other layers still zero"
        )
        return check(f"{self.tier}.cross_layer", count, 0, detail)

    def reset_replay(self) -> Check:
        """The near layer again, after its used state was poisoned and reset."""
        poisoned = jax.tree.map(lambda x: x.at[self.near, :, ..., 0].set(jnp.nan), self.state)
        clean = self.bank.reset(poisoned, self.near)
        again, state = bank_decode(self.bank, clean, self.tokens, self.near, self.backend)
        count = self.difference(np.asarray(again[0]), state, self.near)
        detail = (
            f"layer {self.near} used, poisoned with NaN and reset; all {len(self.ys)} tokens again"
        )
        return check(f"{self.tier}.reset_replay", count, 0, detail)

    def repeat(self) -> Check:
        """One step of the near layer from one live state, over and over in one device run."""
        repetitions = REPETITIONS["cpu" if jax.default_backend() == "cpu" else "gpu"]
        params = self.bank.layers[self.near].params("verify", self.near)
        if self.backend == "pallas":
            params = params_to_kernel(params)
        state = jax.tree.map(lambda x: x[self.near], self.state)
        count = unequal_repeats(
            params, state, self.tokens[:, 0], self.bank.cfg, self.backend, repetitions
        )
        detail = f"{repetitions} repetitions of one step from one state: output, S and history"
        return check(f"{self.tier}.repeat", int(count), 0, detail)

    def host_vs_device(self, trip: Row) -> Check:
        """T host round trips against the one device run; ``trip`` is what one of them costs."""
        host, state = self.bank.decode_host(
            self.bank.init_state(), self.near, np.asarray(self.tokens), backend=self.backend
        )
        detail = (
            f"{len(self.ys)} host round trips against one device run; a round trip of one token "
            f"costs {trip['median_us']:.1f} µs (interquartile range {trip['iqr_us']:.1f}, "
            f"{trip['repetitions']} repetitions, clock resolution "
            f"{trip['clock_resolution_us']:.3f})"
        )
        count = self.difference(host[0], state, self.near)
        return check(f"{self.tier}.host_vs_device", count, 0, detail)
