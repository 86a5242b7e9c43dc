"""What one layer of a bank holds, and the rules that keep it whole."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gdn_jax.config import GDNConfig
from gdn_jax.errors import (
    LayerNotResidentError,
    PoolKeyError,
    ShapeError,
    StaleBindingError,
    TierConflictError,
)
from gdn_jax.layer.params import LARGE, SMALL, GDNParams, check_params, param_dims
from gdn_jax.quant.project import Weight
from gdn_jax.quant.q4_pool import Q4Pool
from gdn_jax.types import Array


@dataclasses.dataclass(frozen=True)
class Binding:
    """Three keys of one generation of a pool, by the field names of GDNParams."""

    pool: Q4Pool
    generation: int
    keys: Mapping[str, str]

    @property
    def stale(self) -> bool:
        """Whether the pool was cleared or rebuilt after the binding."""
        return self.generation != self.pool.generation


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class ResidentLayer:
    """One layer's weights: six small tensors, and three large ones held here or bound by key.

    ``large`` and ``binding`` exclude each other, so that no projection is ever held twice.
    A pytree of its arrays, those of its binding included: the binding itself is no part of the
    pytree, and ``lost`` says in a rebuilt layer that it was stale.
    """

    small: Mapping[str, Array] | None = None
    large: Mapping[str, Weight] | None = None
    binding: Binding | None = None
    lost: bool = False

    @property
    def stale(self) -> bool:
        """Whether the layer was bound to a pool that has changed since."""
        return self.lost or (self.binding is not None and self.binding.stale)

    @property
    def projections(self) -> Mapping[str, Weight] | None:
        """The three large weights, fetched from the pool if bound; None if the layer has none."""
        if self.binding is None or self.binding.stale:
            return self.large
        return {field: self.binding.pool[key] for field, key in self.binding.keys.items()}

    @property
    def resident(self) -> bool:
        """Whether the layer can be stepped."""
        return not self.stale and self.small is not None and self.projections is not None

    def params(self, where: str, layer: int) -> GDNParams:
        """The whole layer.

        Raises:
            StaleBindingError: it was bound to a pool that has changed since.
            LayerNotResidentError: some of its weights are missing.
        """
        if self.stale:
            raise StaleBindingError(
                f"{where}: layer {layer} is bound to an int4 pool that was cleared or rebuilt "
                f"since; bind_q4({layer}, ...) again"
            )
        projections = self.projections
        if self.small is None and projections is None:
            missing, how = "is not resident", f"preload({layer}, params)"
        elif self.small is None:
            missing, how = "lacks its small tensors", f"preload_small({layer}, params)"
        elif projections is None:
            missing, how = "lacks its projections", f"bind_q4({layer}, pool, ...)"
        else:
            return GDNParams(**{**self.small, **projections})  # pyright: ignore[reportArgumentType]
        raise LayerNotResidentError(f"{where}: layer {layer} {missing}; {how} first")

    def loaded(self, where: str, layer: int, params: GDNParams, cfg: GDNConfig) -> "ResidentLayer":
        """The layer with all nine weights held directly, on the default device."""
        check_params(where, params, cfg)
        if self.binding is not None:
            raise TierConflictError(
                f"{where}: layer {layer} is bound to an int4 pool; release({layer}) first, since "
                "a layer never holds two forms of a projection"
            )
        small, large = ({n: getattr(params, n) for n in names} for names in (SMALL, LARGE))
        return ResidentLayer(*(jax.tree.map(jnp.asarray, part) for part in (small, large)))

    def with_small(self, where: str, params: GDNParams, cfg: GDNConfig) -> "ResidentLayer":
        """The layer with these six small tensors, on the default device."""
        check_params(where, params, cfg, SMALL)
        small = {name: jnp.asarray(getattr(params, name)) for name in SMALL}
        return dataclasses.replace(self, small=small)

    def bound(
        self, where: str, layer: int, pool: Q4Pool, keys: Mapping[str, str], cfg: GDNConfig
    ) -> "ResidentLayer":
        """The layer with its large weights bound to a pool, all three or none."""
        if not isinstance(pool, Q4Pool):
            raise ShapeError(f"{where}: pool is a {type(pool).__name__}; needed gdn_jax.Q4Pool")
        if self.large is not None:
            raise TierConflictError(
                f"{where}: layer {layer} holds its projections itself; release({layer}) first, "
                "since a layer never holds two forms of a projection"
            )
        for field, key in keys.items():
            needed = tuple(size for _, size in param_dims(cfg)[field])
            if key not in pool:
                have = ", ".join(pool) or "nothing"
                raise PoolKeyError(f"{where}: no key {key!r} for {field}; the pool has {have}")
            if pool[key].shape != needed:
                found = pool[key].shape
                raise ShapeError(f"{where}: {key!r} has shape {found}; {field} needs {needed}")
        binding = Binding(pool, pool.generation, dict(keys))
        return ResidentLayer(self.small, None, binding)

    def tree_flatten(self) -> tuple[tuple[Any, Any], bool]:
        return (self.small, self.projections), self.stale

    @classmethod
    def tree_unflatten(cls, stale: bool, arrays: tuple[Any, Any]) -> "ResidentLayer":
        return cls(*arrays, lost=stale)
