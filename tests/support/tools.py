"""What the tests share: tolerances, comparisons, and functions compiled once for all modules."""

import re
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.report.metrics import distance, unequal
from pallas_kernels import support
from tests.support.cases import LayerCase, layer_inputs
from tests.support.margins import note

OP = "recurrent_gated_delta_rule"


def pretend_device(
    monkeypatch: pytest.MonkeyPatch, capability: str = "9.0", platform: str = "gpu"
) -> None:
    """Let the support module see such a device."""
    version = "cuda 13000" if platform == "gpu" else platform
    client = types.SimpleNamespace(platform_version=version)
    seen = types.SimpleNamespace(platform=platform, client=client, compute_capability=capability)
    monkeypatch.setattr(support.jax, "devices", lambda: [seen])


EPS = 2.0**-24
"""The most that one rounding to float32 changes, of the value."""

MAX_REL = {
    # n·EPS after n roundings in a row, in any order (Higham, Accuracy and Stability of Numerical
    # Algorithms, 3.1), whatever vectors and threads a processor sums with. Roundings rarely all
    # point one way: what was measured with SSE4.2 and AVX is a fourth or less. How near each
    # distance comes: `pytest --margins FILE`.
    #
    # A few products, their sum, and an exponential or a root.
    "elementwise": 16 * EPS,
    # The two sums over K of 16, for Sᵀk and Sᵀq, and a state that the decay lets forget.
    "float32": 32 * EPS,
    # Without decay every token's rounding stays in the state: 64 tokens.
    "float32_undecayed": 64 * EPS,
    # A projection: 32 terms of a group and 32 groups, or a row of 1024 in vectors of 16.
    "sum": 64 * EPS,
    # The output is rounded once, by at most half an ulp: of 8 bits, and of 11.
    "bfloat16": 2.0**-8 + 32 * EPS,
    "float16": 2.0**-11 + 32 * EPS,
    # A whole layer: a projection over D of 64, then the two sums over K of 16; the norms keep the
    # relative error of an output, however small.
    "layer": 96 * EPS,
    # One head by itself, or the worst of 512 tokens: q·k may cancel to half, and the gated norm
    # then raises a small output, error and all, to unit size.
    "layer_worst": 192 * EPS,
    # A model of four layers beside transformers, whose own prefill is as far as 9e-6 from its own
    # steps: four layers of each, and as much again for what transformers computes.
    "model": 8 * 96 * EPS,
}

decode_step = jax.jit(gdn.decode_step, static_argnames=("cfg", "backend"))
decode = jax.jit(gdn.decode, static_argnames=("cfg", "backend"))
trace_step = jax.jit(gdn.trace_step, static_argnames=("cfg", "backend"))
delta_rule = jax.jit(gdn.recurrent_gated_delta_rule, static_argnames=("use_qk_l2norm", "backend"))
causal_conv1d = jax.jit(gdn.causal_conv1d)


def forget_programs() -> None:
    """Trace anew what modules of the package jitted; ``jax.clear_caches`` would drop far more."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "gdn_jax":
            for jitted in vars(module).values():
                if hasattr(jitted, "clear_cache"):
                    jitted.clear_cache()


def max_rel(out: Any, ref: Any) -> float:
    """max|out - ref| / max|ref|, infinite for anything that is not finite."""
    return distance(np.asarray(out), np.asarray(ref)).max_rel


def assert_close(out: Any, ref: Any, limit: float, what: str = "") -> None:
    """Assert a distance of at most ``limit``."""
    found = max_rel(out, ref)
    note(found, limit, what)
    assert found <= limit, f"{what}: max_rel {found:.3e} above {limit:.1e}"


def assert_same_bits(a: Any, b: Any, what: str = "") -> None:
    """Assert that two pytrees of arrays agree in every bit."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        assert unequal(np.asarray(x), np.asarray(y)) == 0, what


def layer(case: LayerCase) -> tuple[gdn.GDNParams, gdn.GDNState, jax.Array]:
    """Weights, state and input of a case as device arrays."""
    weights, xs, state = layer_inputs(case)
    params = gdn.GDNParams(**{name: jnp.asarray(x) for name, x in weights.items()})
    return params, gdn.import_state(state, case.cfg), jnp.asarray(xs)


def assert_refused(
    call: Callable[[], Any], *fragments: str, error: type[Exception] = gdn.GDNError
) -> str:
    """Assert that a call raises one clear line that holds every fragment; return the line."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, gdn.GDNError)
    assert "\n" not in message
    for fragment in fragments:
        assert re.search(re.escape(fragment), message), f"{fragment!r} not in {message!r}"
    return message
