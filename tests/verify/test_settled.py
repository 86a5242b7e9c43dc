"""States updated in place reach a caller's loop through a barrier.

Without it XLA fuses a kernel with the update of a stack that keeps its result: on a GPU a scan that
collects states then keeps memory that nobody wrote.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import gdn_jax as gdn
from tests.support.mosaic import operations
from tests.support.tools import pretend_device

B, T = 2, 3
Body = Callable[[Any, Any], tuple[Any, Any]]


def layer() -> tuple[Body, Any, jax.Array]:
    cfg = gdn.GDNConfig(256, 1, 2, 64, 128)
    params = gdn.init_params(jax.random.key(0), cfg)

    def token(state: gdn.GDNState, x: jax.Array) -> Any:
        y, state = gdn.decode_step(params, state, x, cfg, backend="pallas")
        return state, (y, state)

    return token, gdn.init_state(cfg, B), jnp.zeros((T, B, cfg.d_model))


def rule() -> tuple[Body, Any, jax.Array]:
    q, v, g = jnp.ones((B, 1, 1, 64)), jnp.ones((B, 1, 2, 128)), jnp.zeros((B, 1, 2))

    def token(S: jax.Array, x: jax.Array) -> Any:
        o, S = gdn.recurrent_gated_delta_rule(q, q, v, g, g + x, initial_state=S, backend="pallas")
        return S, (o, S)

    return token, jnp.zeros((B, 2, 64, 128)), jnp.zeros(T)


@pytest.mark.slow
@pytest.mark.parametrize(("made", "states"), [(layer, 3), (rule, 1)])
def test_a_loop_gets_them_from_a_barrier(
    monkeypatch: pytest.MonkeyPatch, made: Any, states: int
) -> None:
    pretend_device(monkeypatch)
    token, start, xs = made()
    traced = jax.jit(lambda start, xs: lax.scan(token, start, xs)).trace(start, xs)
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    users = [use.owner.name for x in updated_in_place(module) for use in x.uses]
    assert len(users) == states
    assert set(users) <= {"stablehlo.custom_call", "stablehlo.optimization_barrier"}


def updated_in_place(module: Any) -> list[Any]:
    """Results of kernels that are an operand of theirs."""
    found = []
    for op in operations(module, "stablehlo.custom_call"):
        if "output_operand_aliases" in op.attributes:
            for alias in op.attributes["output_operand_aliases"]:
                at = re.search(r"output_tuple_indices = \[(\d*)\]", str(alias))
                assert at
                found.append(op.results[int(at[1] or 0)])
    return found
