"""Values inside ``jax.shard_map`` that one device may hold differently from another."""

import jax
from jax import lax


def varying_like[T](carry: T, *inputs: object) -> T:
    """The pytree ``carry``, typed as varying over every mesh axis that it or an input varies over.

    A loop's carry must come out with the type that it went in with. One that is made inside of
    ``jax.shard_map``, a state of zeros for instance, is typed as equal on all devices until an
    input that is not mixes with it. No value changes; outside of ``shard_map``, and in one with
    ``check_vma=False``, ``carry`` comes back as it is.
    """
    axes = frozenset().union(*(jax.typeof(x).vma for x in jax.tree.leaves((carry, inputs))))
    return jax.tree.map(lambda x: _over(x, axes), carry) if axes else carry


def _over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - jax.typeof(x).vma))
    return lax.pcast(x, missing, to="varying") if missing else x
