"""Resident layers: which weights are on the device, and the rule that nothing else is stepped."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax._core.checks import check_config
from gdn_jax.config import GDNConfig
from gdn_jax.errors import ShapeError
from gdn_jax.layer.compose import checked_backend, decode_step, forward, scan_tokens
from gdn_jax.layer.pallas import KernelLayer, params_to_kernel
from gdn_jax.layer.params import LARGE, SMALL, GDNParams, check_params
from gdn_jax.layer.state import GDNState, check_state, zeros
from gdn_jax.quant.q4_pool import Q4Pool
from gdn_jax.serving.resident import Slot
from gdn_jax.serving.slot_steps import SlotSteps
from gdn_jax.types import Token, Tokens


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class LayerBank(SlotSteps):
    """The resident weights of a stack of ``num_layers`` layers of one shape; an immutable pytree.

    Every change returns a new bank that shares its arrays with the old one, so a refused change
    leaves the bank exactly as it was. A layer is stepped only when all of its weights are
    resident; otherwise an error, before any state changes. A layer's three large projections are
    held directly or bound to a :class:`gdn_jax.Q4Pool` by key, never both.

    ``layer`` is a static Python integer everywhere. Passed through ``jit`` or ``jax.tree.map``, a
    bank becomes a snapshot that holds the arrays of its bindings; a function that closes over a
    bank keeps those of the moment it was traced.

    Raises:
        ShapeError: ``cfg`` is not a GDNConfig or ``num_layers`` not a positive integer.
    """

    cfg: GDNConfig
    num_layers: int
    slots: tuple[Slot, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_config("LayerBank", self.cfg)
        if type(self.num_layers) is not int or self.num_layers < 1:
            found = self.num_layers
            raise ShapeError(f"LayerBank: num_layers is {found!r}; needed a positive integer")
        if not self.slots:
            object.__setattr__(self, "slots", (Slot(),) * self.num_layers)

    @property
    def resident(self) -> tuple[int, ...]:
        """The layers that can be stepped."""
        return tuple(i for i, slot in enumerate(self.slots) if slot.resident)

    def preload(self, layer: int, params: GDNParams) -> "LayerBank":
        """A bank in which ``layer`` holds these nine weights, moved to the default device.

        Raises:
            ShapeError: no such layer, or weights that do not fit the configuration.
            TierConflictError: the layer is bound to an int4 pool; nothing is allocated.
        """
        where = "LayerBank.preload"
        self._check_layer(where, layer)
        check_params(where, params, self.cfg)
        return self._with(layer, self.slots[layer].loaded(where, layer, params))

    def preload_small(self, layer: int, params: GDNParams) -> "LayerBank":
        """A bank in which ``layer`` holds the six small tensors; the large ones may be None.

        Raises:
            ShapeError: no such layer, or tensors that do not fit the configuration.
        """
        where = "LayerBank.preload_small"
        self._check_layer(where, layer)
        check_params(where, params, self.cfg, SMALL)
        return self._with(layer, self.slots[layer].with_small(params))

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
        if not isinstance(pool, Q4Pool):
            raise ShapeError(f"{where}: pool is a {type(pool).__name__}; needed gdn_jax.Q4Pool")
        keys: dict[str, str] = dict(zip(LARGE, (qkv, z, out), strict=True))
        return self._with(layer, self.slots[layer].bound(where, layer, pool, keys, self.cfg))

    def release(self, layer: int) -> "LayerBank":
        """A bank in which ``layer`` holds nothing and is bound to nothing.

        Raises:
            ShapeError: no such layer.
        """
        self._check_layer("LayerBank.release", layer)
        return self._with(layer, Slot())

    def init_state(self, batch: int = 1) -> GDNState:
        """Zeros for the whole stack: S [L, B, HV, K, V], conv_hist [L, B, W-1, C], float32."""
        return zeros("LayerBank.init_state", self.cfg, (self.num_layers, batch))

    def reset(self, state: GDNState, layer: int) -> GDNState:
        """The state with one layer's part zeroed, whatever it held."""
        self._check_layer("LayerBank.reset", layer)
        check_state("LayerBank.reset", state, self.cfg, layers=self.num_layers)
        return jax.tree.map(lambda x: x.at[layer].set(0.0), state)

    def step(
        self, state: GDNState, layer: int, x: Token, *, backend: str | None = None
    ) -> tuple[Token, GDNState]:
        """One token of one layer: :func:`gdn_jax.decode_step` on that layer's part of the state.

        Traceable, on device arrays; jit it with the state donated for an update in place.

        Raises:
            LayerNotResidentError: the layer's weights are not resident; StaleBindingError when
                its int4 pool was cleared or rebuilt since it was bound.
            ShapeError: an argument of the wrong shape, rank or dtype, or no such layer.
        """
        params, part = self._ready("LayerBank.step", state, layer)
        if checked_backend("decode_step", params, part, x, self.cfg, backend) == "pallas":
            y, state, _ = KernelLayer(params, self.cfg).step(state, layer, x)
            return y, state
        y, part, _ = forward(params, part, x, self.cfg)
        return y, _write(state, layer, part)

    def decode(
        self, state: GDNState, layer: int, xs: Tokens, *, backend: str | None = None
    ) -> tuple[Tokens, GDNState]:
        """T tokens of one layer in one device run: :func:`gdn_jax.decode` on its part of the state.

        Traceable; errors as :meth:`step`.
        """
        params, part = self._ready("LayerBank.decode", state, layer)
        chosen = checked_backend("decode", params, part, xs, self.cfg, backend, many=True)
        if chosen == "pallas":
            kernels = KernelLayer(params, self.cfg)
            return scan_tokens(lambda state, x: kernels.step(state, layer, x), state, xs)
        ys, part = scan_tokens(lambda part, x: forward(params, part, x, self.cfg), part, xs)
        return ys, _write(state, layer, part)

    def decode_host(
        self, state: GDNState, layer: int, xs: np.ndarray, *, backend: str | None = None
    ) -> tuple[np.ndarray, GDNState]:
        """T tokens of one layer with a host round trip for each: xs, ys NumPy [B, T, D] float32.

        Every token's input goes to the device and its output comes back before the next one
        starts; weights and state stay on the device. Host-facing: the step is jitted here, and the
        layer's part of the state is copied once, so that the step may update it in place.
        Errors as :meth:`step`.
        """
        where = "LayerBank.decode_host"
        params, part = self._ready(where, state, layer)
        if not isinstance(xs, np.ndarray):
            raise ShapeError(f"{where}: xs is a {type(xs).__name__}; needed a numpy array")
        chosen = checked_backend("decode", params, part, xs, self.cfg, backend, many=True)
        if chosen == "pallas":
            params = params_to_kernel(params)
        ys = np.empty_like(xs)
        for t in range(xs.shape[1]):
            y, part = _host_step(params, part, jnp.asarray(xs[:, t]), self.cfg, chosen)
            ys[:, t] = np.asarray(y)
        return ys, _write(state, layer, part)

    def _with(self, layer: int, slot: Slot) -> "LayerBank":
        slots = (*self.slots[:layer], slot, *self.slots[layer + 1 :])
        return dataclasses.replace(self, slots=slots)

    def _ready(self, where: str, state: GDNState, layer: int) -> tuple[GDNParams, GDNState]:
        self._check_layer(where, layer)
        params = self.slots[layer].params(where, layer)
        check_state(where, state, self.cfg, layers=self.num_layers)
        return params, jax.tree.map(lambda x: x[layer], state)

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        arrays = [(slot.small, slot.projections) for slot in self.slots]
        return arrays, (self.cfg, self.num_layers, tuple(slot.stale for slot in self.slots))

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: list[Any]) -> "LayerBank":
        cfg, num_layers, stale = aux
        slots = tuple(Slot(*arrays, lost=s) for arrays, s in zip(children, stale, strict=True))
        return cls(cfg, num_layers, slots)


def _write(state: GDNState, layer: int, part: GDNState) -> GDNState:
    return jax.tree.map(lambda whole, new: whole.at[layer].set(new), state, part)


@functools.partial(jax.jit, static_argnames=("cfg", "backend"), donate_argnames="state")
def _host_step(params: GDNParams, state: GDNState, x: Token, cfg: GDNConfig, backend: str):
    return decode_step(params, state, x, cfg, backend=backend)
