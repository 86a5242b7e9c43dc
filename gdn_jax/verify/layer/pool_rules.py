"""The four residency rules of int4 pools, each broken once to see the refusal."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np

from gdn_jax.errors import GDNError, LayerNotResidentError, StaleBindingError, TierConflictError
from gdn_jax.layer.params import LARGE, GDNParams
from gdn_jax.quant.q4_pool import Q4Pool
from gdn_jax.quant.q4array import Q4Array
from gdn_jax.report.record import Check
from gdn_jax.serving.bank import LayerBank
from gdn_jax.verify.catalogue import check


def residency_check(
    bank: LayerBank, params: GDNParams, int4: Mapping[str, Q4Array], tokens: jax.Array
) -> Check:
    """Count the rules of which a violation is not refused.

    Args:
        bank: layer 0 in float32, layer 1 bound to a pool.
        params: the layer's float32 weights.
        int4: its three projections by field name.
        tokens: [1, T, D].
    """
    pool = Q4Pool({"qkv": int4["in_proj_qkv"], "z": int4["in_proj_z"], "out": int4["out_proj"]})
    keys = {"qkv": "qkv", "z": "z", "out": "out"}
    empty = LayerBank(bank.cfg, 2)
    small = empty.preload_small(1, params)
    bound = small.bind_q4(1, pool, **keys)
    held = empty.preload(1, dataclasses.replace(params, **{n: int4[n] for n in LARGE}))
    state = empty.init_state()
    x = tokens[:, 0]

    def stale(change: Callable[[Q4Pool], None]) -> Callable[[], object]:
        other = Q4Pool(dict(pool.items()))
        late = small.bind_q4(1, other, **keys)
        change(other)
        return lambda: late.step(state, 1, x)

    rules: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "small tensors alone": (LayerNotResidentError, lambda: small.step(state, 1, x)),
        "no small tensors": (
            LayerNotResidentError,
            lambda: empty.bind_q4(1, pool, **keys).step(state, 1, x),
        ),
        "unknown key": (KeyError, lambda: small.bind_q4(1, pool, qkv="qkv", z="no", out="out")),
        "mis-shaped matrix": (
            ValueError,
            lambda: small.bind_q4(1, pool, qkv="qkv", z="z", out="qkv"),
        ),
        "float32 into a bound layer": (TierConflictError, lambda: bound.preload(1, params)),
        "binding a float32 layer": (TierConflictError, lambda: bank.bind_q4(0, pool, **keys)),
        "binding a layer that holds int4": (
            TierConflictError,
            lambda: held.bind_q4(1, pool, **keys),
        ),
        "pool cleared": (StaleBindingError, stale(Q4Pool.clear)),
        "pool rebuilt the same": (StaleBindingError, stale(lambda p: p.rebuild(dict(p.items())))),
    }
    accepted = [name for name, (error, attempt) in rules.items() if not _refused(error, attempt)]
    intact = not np.any(np.asarray(state.S)) and bound.resident == (1,) and small.resident == ()
    detail = f"{len(rules)} violations tried; accepted: {', '.join(accepted) or 'none'}"
    return check("q4.residency", len(accepted) + (not intact), 0, detail)


def _refused(error: type[Exception], attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except GDNError as raised:
        return isinstance(raised, error)
    return False
