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
RUNNABLE = sorted({"xla", gdn.select_backend(OP, K=16, V=8)})
"""Backends for the small heads of the shared cases; wide ones: test_pallas_delta_rule.py."""


def pretend_device(
    monkeypatch: pytest.MonkeyPatch, capability: str = "9.0", platform: str = "gpu"
) -> None:
    """Let the support module see such a device."""
    version = "cuda 13000" if platform == "gpu" else platform
    client = types.SimpleNamespace(platform_version=version)
    seen = types.SimpleNamespace(platform=platform, client=client, compute_capability=capability)
    monkeypatch.setattr(support.jax, "devices", lambda: [seen])


MAX_REL = {
    # About ten roundings of 2**-24: the sums over K, and a state that the decay lets forget.
    "float32": 1e-6,
    # Without decay every token's rounding stays in the state and adds up like a random walk.
    "float32_undecayed": 3e-6,
    # The output is rounded once, by at most half an ulp of the largest value.
    "bfloat16": 2.0**-9 + 1e-6,
    "float16": 2.0**-11 + 1e-6,
    # A whole layer: projections over D, 6e-7 as one dot for several rows, then two norms that
    # raise a small output, error and all, to unit size.
    "layer": 5e-6,
    # One head by itself, or the worst of 512 tokens: q·k may cancel, and the gated norm then
    # raises a small output, error and all, to unit size.
    "layer_worst": 1e-5,
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
