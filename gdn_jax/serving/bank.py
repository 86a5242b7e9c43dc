"""Resident layers: which weights are on the device, and that only such layers are stepped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import check_config
from gdn_jax._core.varying import varying_like
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError
from gdn_jax.layer.compose import check_tokens, decode_step, forward, scan_tokens
from gdn_jax.layer.pallas import KernelLayer, backend_for, params_to_kernel
from gdn_jax.layer.params import LARGE, GDNParams, check_params
from gdn_jax.layer.state import GDNState, check_state, zeros
from gdn_jax.quant.q4_pool import Q4Pool
from gdn_jax.serving.drafts import DraftRecord, planned
from gdn_jax.serving.pool import StatePool, check_pool
from gdn_jax.serving.resident import ResidentLayer
from gdn_jax.serving.rows import draft_rows, step_rows
from gdn_jax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerBank:
    """The resident weights of a stack of ``num_layers`` layers of one shape; an immutable pytree.

    Every change returns a new bank that shares its arrays with the old one, so a refused change
    leaves the bank exactly as it was. A layer is stepped only when all of its weights are
    resident; otherwise a step raises before any state changes. A layer's three large projections
    are held directly or bound to a :class:`gdn_jax.Q4Pool` by key, never both.

    ``layer`` is a static Python integer everywhere. Passed through ``jit`` or ``jax.tree.map``, a
    bank becomes a snapshot that holds the arrays of its bindings; a function that closes over a
    bank keeps the arrays that it had when it was traced.

    Raises:
        ShapeError: ``cfg`` is not a GDNConfig or ``num_layers`` not a positive integer.
    """

    cfg: GDNConfig = dataclasses.field(metadata={"static": True})
    num_layers: int = dataclasses.field(metadata={"static": True})
    layers: tuple[ResidentLayer, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_config("LayerBank", self.cfg)
        if type(self.num_layers) is not int or self.num_layers < 1:
            found = self.num_layers
            raise ShapeError(f"LayerBank: num_layers is {found!r}; needed a positive integer")
        if not self.layers:
            object.__setattr__(self, "layers", (ResidentLayer(),) * self.num_layers)

    @property
    def resident(self) -> tuple[int, ...]:
        """The layers that can be stepped."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.resident)

    def preload(self, layer: int, params: GDNParams) -> "LayerBank":
        """A bank in which ``layer`` holds these nine weights, moved to the default device.

        Raises:
            ShapeError: no such layer, or weights that do not fit the configuration.
            TierConflictError: the layer is bound to an int4 pool; nothing is allocated.
        """
        where = "LayerBank.preload"
        self._check_layer(where, layer)
        return self._with(layer, self.layers[layer].loaded(where, layer, params, self.cfg))

    def preload_small(self, layer: int, params: GDNParams) -> "LayerBank":
        """A bank in which ``layer`` holds the six small tensors; the large ones may be None.

        Raises:
            ShapeError: no such layer, or tensors that do not fit the configuration.
        """
        where = "LayerBank.preload_small"
        self._check_layer(where, layer)
        return self._with(layer, self.layers[layer].with_small(where, params, self.cfg))

    def bind_q4(self, layer: int, pool: Q4Pool, *, qkv: str, z: str, out: str) -> "LayerBank":
        """A bank in which ``layer`` takes its projections from a pool: all three or none.

        Raises:
            PoolKeyError: a KeyError; the pool has no such key.
            ShapeError: no such layer, not a pool, or a matrix that is not exactly of the
                projection's shape.
            TierConflictError: the layer holds projections itself.
        """
        where = "LayerBank.bind_q4"
        self._check_layer(where, layer)
        keys: dict[str, str] = dict(zip(LARGE, (qkv, z, out), strict=True))
        return self._with(layer, self.layers[layer].bound(where, layer, pool, keys, self.cfg))

    def release(self, layer: int) -> "LayerBank":
        """A bank in which ``layer`` holds nothing and is bound to nothing.

        Raises:
            ShapeError: no such layer.
        """
        self._check_layer("LayerBank.release", layer)
        return self._with(layer, ResidentLayer())

    def init_state(self, batch: int = 1) -> GDNState:
        """Zeros for the whole stack: S [L, B, HV, K, V], conv_hist [L, B, W-1, C], float32."""
        return zeros("LayerBank.init_state", self.cfg, (self.num_layers, batch))

    def reset(self, state: GDNState, layer: int) -> GDNState:
        """The state with one layer's part zeroed, whatever it held."""
        self._check_layer("LayerBank.reset", layer)
        check_state("LayerBank.reset", state, self.cfg, layers=self.num_layers)
        return jax.tree.map(lambda x: x.at[layer].set(0.0), state)

    def step(
        self, state: GDNState, layer: int, x: Array, *, backend: str | None = None
    ) -> tuple[Array, GDNState]:
        """One token of one layer: :func:`gdn_jax.decode_step` on that layer's part of the state.

        Traceable, on device arrays; jit it with the state donated for an update in place.

        Raises:
            LayerNotResidentError: the layer's weights are not resident; StaleBindingError when
                its int4 pool was cleared or rebuilt since it was bound.
            ShapeError: an argument of the wrong shape, rank or dtype, or no such layer.
        """
        where = "LayerBank.step"
        params = self._params(where, layer)
        check_state(where, state, self.cfg, layers=self.num_layers)
        check_tokens(where, x, self.cfg, state.S.shape[1])
        if backend_for("decode_step", params, self.cfg, backend) == "pallas":
            y, state, _ = KernelLayer(params, self.cfg).step(state, layer, x)
            return y, state
        y, part, _ = forward(params, _part(state, layer), x, self.cfg)
        return y, _write(state, layer, part)

    def decode(
        self, state: GDNState, layer: int, xs: Array, *, backend: str | None = None
    ) -> tuple[Array, GDNState]:
        """T tokens of one layer in one device run: :func:`gdn_jax.decode` on its part of the state.

        Traceable; errors as :meth:`step`.
        """
        where = "LayerBank.decode"
        params = self._params(where, layer)
        check_state(where, state, self.cfg, layers=self.num_layers)
        check_tokens(where, xs, self.cfg, state.S.shape[1], many=True)
        state = varying_like(state, params, xs)
        if backend_for("decode", params, self.cfg, backend) == "pallas":
            kernels = KernelLayer(params, self.cfg)
            return scan_tokens(lambda state, x: kernels.step(state, layer, x), state, xs)
        part = _part(state, layer)
        ys, part = scan_tokens(lambda part, x: forward(params, part, x, self.cfg), part, xs)
        return ys, _write(state, layer, part)

    def decode_host(
        self, state: GDNState, layer: int, xs: np.ndarray, *, backend: str | None = None
    ) -> tuple[np.ndarray, GDNState]:
        """T tokens of one layer with a host round trip for each: xs, ys NumPy [B, T, D].

        Every token's input goes to the device and its output comes back before the next one
        starts; weights and state stay on the device. Host-facing: the step is jitted here and
        updates a copy of the layer's part of the state in place. Errors as :meth:`step`.
        """
        where = "LayerBank.decode_host"
        params = self._params(where, layer)
        check_state(where, state, self.cfg, layers=self.num_layers)
        if not isinstance(xs, np.ndarray):
            raise ShapeError(f"{where}: xs is a {type(xs).__name__}; needed a numpy array")
        check_tokens(where, xs, self.cfg, state.S.shape[1], many=True)
        chosen = backend_for("decode", params, self.cfg, backend)
        part = _part(state, layer)
        if chosen == "pallas":
            params = params_to_kernel(params)
        ys = np.empty_like(xs)
        for t in range(xs.shape[1]):
            y, part = _host_step(params, part, jnp.asarray(xs[:, t]), self.cfg, backend=chosen)
            ys[:, t] = np.asarray(y)
        return ys, _write(state, layer, part)

    def step_slots(
        self,
        pool: StatePool,
        layer: int,
        x: Array,
        slots: Array,
        *,
        write_slots: Array | None = None,
        backend: str | None = None,
    ) -> tuple[Array, StatePool]:
        """One token of one layer for B sequences of a pool: row b is in slot ``slots[b]``.

        A row of slot -1, to read or to write, is idle: it reads and writes nothing and its output
        is zero. The other rows do not depend on it. Traceable; jit it with the pool donated
        for an update in place. A row's bits depend on B and the backend, not on what the other rows
        hold; alone in a batch it agrees within 1e-6.

        Args:
            pool: of this bank's configuration and number of layers.
            layer: index in the stack.
            x: [B, D] float32, bfloat16 or float16, as for :func:`gdn_jax.decode_step`.
            slots: int32 [B], the slots whose states are read.
            write_slots: int32 [B], where the new states go; ``slots`` by default. To leave a
                prefix unchanged, write elsewhere. No slot may be written twice.
            backend: as for :func:`gdn_jax.decode_step`.

        Raises:
            LayerNotResidentError: as :meth:`step`.
            ShapeError: an argument of the wrong shape, rank or dtype, or another pool.
            SlotError: a slot that is out of range, written twice or not in use, unless traced.
        """
        params, rows, chosen = self.ready_to_step(pool, layer, x, slots, write_slots, backend)
        y, states = step_rows(params, pool.states, layer, x, rows, self.cfg, chosen)
        return y, dataclasses.replace(pool, **vars(states))

    def ready_to_step(
        self,
        pool: StatePool,
        layer: int,
        x: Array,
        slots: Array,
        write_slots: Array | None,
        backend: str | None,
    ) -> tuple[GDNParams, tuple[Array, Array], str]:
        """Weights, slots read and written, and backend, after the checks of :meth:`step_slots`."""
        where = "LayerBank.step_slots"
        params = self._params(where, layer)
        check_pool(where, pool, self.cfg, self.num_layers)
        check_tokens(where, x, self.cfg)
        B, apart = len(x), write_slots is not None
        read = pool.table.check_rows(where, "slots", slots, B, repeats=apart)
        write = pool.table.check_rows(where, "write_slots", write_slots, B) if apart else read
        return params, (read, write), backend_for("decode_step", params, self.cfg, backend)

    def draft_slots(
        self,
        pool: StatePool,
        layer: int,
        xs: Array,
        slots: Array,
        *,
        lengths: Array | None = None,
        parents: Array | None = None,
        scheme: str = "snapshot",
        backend: str | None = None,
    ) -> tuple[Array, DraftRecord]:
        """Up to Td draft tokens a row, xs [B, Td, D], from the slots of a pool that is not changed.

        ``pool.commit({layer: record}, slots, accepted)`` advances the slots by what was accepted,
        exactly as decoding those tokens one by one: bit for bit on one backend.

        Args:
            pool, layer, slots, backend: as for :meth:`step_slots`; a slot may be read twice.
            xs: inputs; tokens beyond a row's length give zeros and cannot be accepted.
            lengths: int32 [B], 0 to Td; all by default.
            parents: int32 [B, Td] for a tree: the earlier token that token t continues, or -1
                for the slot's own state; a chain by default.
            scheme: "snapshot" or "replay", see :mod:`gdn_jax.serving.drafts`.

        Returns:
            ys [B, Td, D], and the record that a commit needs.

        Raises:
            LayerNotResidentError, ShapeError, SlotError: as :meth:`step_slots`.
            UnknownNameError: no such scheme.
        """
        where = "LayerBank.draft_slots"
        params = self._params(where, layer)
        check_pool(where, pool, self.cfg, self.num_layers)
        check_tokens(where, xs, self.cfg, many=True)
        rows = pool.table.check_rows(where, "slots", slots, len(xs), repeats=True)
        plan = planned(where, len(xs), xs.shape[1], lengths, parents, scheme)
        chosen = backend_for("decode", params, self.cfg, backend)
        return draft_rows(params, pool.states, layer, xs, rows, plan, self.cfg, chosen)

    def _with(self, layer: int, held: ResidentLayer) -> "LayerBank":
        layers = (*self.layers[:layer], held, *self.layers[layer + 1 :])
        return dataclasses.replace(self, layers=layers)

    def _check_layer(self, where: str, layer: int) -> None:
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            raise ShapeError(f"{where}: layer is {layer!r}; needed 0 to {self.num_layers - 1}")

    def _params(self, where: str, layer: int) -> GDNParams:
        """The layer's weights, all resident and of its sizes."""
        self._check_layer(where, layer)
        params = self.layers[layer].params(where, layer)
        check_params(where, params, self.cfg)
        return params


def _part(state: GDNState, layer: int) -> GDNState:
    return jax.tree.map(lambda x: x[layer], state)


def _write(state: GDNState, layer: int, part: GDNState) -> GDNState:
    return jax.tree.map(lambda whole, new: whole.at[layer].set(new), state, part)


_host_step = jax.jit(decode_step, static_argnames=("cfg", "backend"), donate_argnames="state")
