"""The one decision of the backend: sizes, weights and device in, backend and reason out."""

from typing import Any

import pytest

import gdn_jax as gdn
from gdn_jax._core.backend import CHUNKED, OPS, Matrix, Sizes, choose
from tests.support.tools import assert_refused, pretend_device

CFG = gdn.PRESETS["qwen3.5-27b"]
FLOAT = Matrix("up", (64, 96))
UNEVEN = Matrix("up", (64, 80))
INT4 = Matrix("up", (64, 128), int4=True)
EXCHANGE = INT4._replace(laid_out=False)
UNEVEN_INT4 = Matrix("up", (64, 96), int4=True)


@pytest.mark.parametrize("op", OPS)
def test_every_operator_says_what_the_device_lacks(op: str, monkeypatch) -> None:
    pretend_device(monkeypatch)
    assert choose(op, CFG) == ("pallas", None)
    for device, found in (
        (("9.0", "cpu"), "no CUDA GPU, the device is cpu"),
        (("7.5", "gpu"), "compute capability 7.5, the kernel needs 8.0"),
        (
            ("10.0", "gpu"),
            "capability 10.0, kernels over chunks need 9.0" if op in CHUNKED else None,
        ),
    ):
        pretend_device(monkeypatch, *device)
        if not found:
            assert choose(op, CFG) == ("pallas", None)
            continue
        backend, reason = choose(op, CFG)
        assert backend == "xla"
        assert found in (reason or "")
        assert choose(op, CFG, backend="xla") == ("xla", None)
        refused = assert_refused(
            lambda: choose(op, CFG, backend="pallas"), error=gdn.BackendUnavailableError
        )
        assert refused == f"{op} on backend 'pallas': {reason}; backend='xla' runs it"


@pytest.mark.parametrize(
    ("op", "sizes", "found"),
    [
        ("recurrent_gated_delta_rule", {"K": 96}, "K is 96"),
        ("recurrent_gated_delta_rule", {"tokens": 4097}, "T is 4097"),
        ("recurrent_gated_delta_rule", {"K": 64, "V": 128, "tokens": 4096, "W": 5}, None),
        ("chunk_gated_delta_rule", {"chunk": 32}, "chunks of 32 tokens"),
        ("chunk_gated_delta_rule", {"K": 256}, "K is 256"),
        ("chunk_gated_delta_rule", {"V": 8}, "V is 8"),
        ("chunk_gated_delta_rule", {"chunk": 64, "tokens": 100_000}, None),
        # Only the rule of a prompt runs on kernels: its convolution may have any width.
        ("prefill", {"W": 5}, None),
        ("decode", {"W": 5}, "W is 5"),
        ("decode", {"V": 96}, "V is 96"),
        ("causal_conv1d", {"C": 65}, "C is 65"),
        ("causal_conv1d", {"W": 5}, "W is 5"),
        ("causal_conv1d", {"W": 2, "C": 64, "K": 1}, None),
    ],
)
def test_each_kernel_is_asked_about_its_own_sizes(op, sizes, found, monkeypatch) -> None:
    pretend_device(monkeypatch)
    backend, reason = choose(op, sizes=Sizes(**sizes))
    assert backend == ("xla" if found else "pallas")
    assert (found or "None") in str(reason)


@pytest.mark.parametrize(
    ("weights", "alone", "named", "as_they_are"),
    [
        ([FLOAT, INT4], None, None, None),
        ([UNEVEN, INT4], "up: weights are [64, 80]", "up: weights are [64, 80]", "[64, 80]"),
        ([FLOAT, UNEVEN_INT4], "up: weights are [64, 96]", "multiples of 64", "multiples of 64"),
        ([FLOAT, EXCHANGE], "up: int4 that is not laid out", None, "up: int4 that is not laid out"),
    ],
)
def test_weights_decide(weights, alone, named, as_they_are, monkeypatch) -> None:
    pretend_device(monkeypatch)
    assert (alone or "None") in str(choose("decode", CFG, weights=weights).reason)
    for found, options in ((named, {}), (as_they_are, {"lays_out": False})):
        options: dict[str, Any] = options | {"weights": weights, "backend": "pallas"}
        if found is None:
            assert choose("decode", CFG, **options) == ("pallas", None)
        else:
            assert_refused(
                lambda o=options: choose("decode", CFG, **o),
                *("decode on backend 'pallas'", found),
                error=gdn.BackendUnavailableError,
            )


def test_what_the_caller_knows_counts(monkeypatch) -> None:
    pretend_device(monkeypatch)
    assert choose("q4_matmul", obstacle="it rains") == ("xla", "it rains")
    assert choose("q4_matmul", backend="xla", obstacle="it rains") == ("xla", None)
    error = gdn.BackendUnavailableError
    assert_refused(
        lambda: choose("q4_matmul", backend="pallas", obstacle="it rains"), "it rains", error=error
    )
