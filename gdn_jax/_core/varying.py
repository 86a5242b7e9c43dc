"""Values inside ``jax.shard_map`` that one device may hold differently from another."""

from typing import Any

import jax
from jax import lax


def varying_like[T](carry: T, *inputs: Any) -> T:
    """The pytree ``carry``, typed as varying over every mesh axis that it or an input varies over.

    A loop's carry must come out with the type that it went in with. A carry created inside
    ``jax.shard_map``, such as a state of zeros, is typed as equal on all devices until a varying
    input mixes with it. No value changes; outside ``shard_map``, and inside one with
    ``check_vma=False``, ``carry`` is returned as it is.
    """
    axes = frozenset().union(*map(_axes, jax.tree.leaves((carry, inputs))))
    return jax.tree.map(lambda x: _over(x, axes), carry) if axes else carry


def _axes(x: Any) -> frozenset[Any]:
    return jax.typeof(x).manual_axis_type.varying


def _over(x: Any, axes: frozenset[Any]) -> Any:
    missing = tuple(sorted(axes - _axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
