"""Reading the operators of one token back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.layer.trace import trace_shapes
from tests.support.cases import LAYER
from tests.support.tools import assert_refused, assert_same_bits, layer, trace_step

CASE = LAYER["tiny"]
SENTINEL = 7.25


@pytest.fixture(scope="module")
def trace() -> gdn.Trace:
    params, state, xs = layer(CASE)
    return trace_step(params, state, xs[:, 0], CASE.cfg)[2]


def filled(size: int, dtype: type = np.float32) -> np.ndarray:
    return np.full(size, SENTINEL, dtype)


def test_entries_and_shapes(trace: gdn.Trace) -> None:
    """Every name of the read-back table, float32, the batch axis first."""
    names = ["XC", "Z", "B", "A", "BETA", "G", "XCV", "Q", "K", "ON", "ONN", "OUT", "S", "HIST"]
    assert list(trace) == names
    assert {n: trace[n].shape for n in trace} == {
        n: (CASE.B, *shape) for n, shape in trace_shapes(CASE.cfg).items()
    }
    assert all(x.dtype == jnp.float32 for x in trace.values())


def test_nelems_counts_the_batch_too(trace: gdn.Trace) -> None:
    """B·HV·V = 2·4·8 and B·(W-1)·C = 2·3·96."""
    assert trace.nelems("ON") == 64
    assert trace.nelems("HIST") == 576
    assert all(trace.nelems(name) == np.asarray(x).size for name, x in trace.items())


@pytest.mark.parametrize("spare", [0, 5])
def test_read_into_fills_the_start_and_nothing_else(trace: gdn.Trace, spare: int) -> None:
    buffer = filled(trace.nelems("S") + spare)
    assert trace.read_into("S", buffer) == trace.nelems("S")
    assert_same_bits(buffer[: trace.nelems("S")], np.asarray(trace["S"]).ravel())
    np.testing.assert_array_equal(buffer[trace.nelems("S") :], SENTINEL)


def test_read_into_a_buffer_of_the_entrys_shape(trace: gdn.Trace) -> None:
    buffer = np.empty(trace["Q"].shape, np.float32)
    trace.read_into("Q", buffer)
    assert_same_bits(buffer, trace["Q"])


def read_only(size: int) -> np.ndarray:
    buffer = filled(size)
    buffer.flags.writeable = False
    return buffer


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda n: filled(n - 1), ["holds 63 elements", "needed 64"]),
        (lambda n: filled(0), ["holds 0 elements", "needed 64"]),
        (lambda n: filled(n, np.float64), ["float64", "needed a numpy array of float32"]),
        (lambda n: filled(2 * n)[::2], ["strided", "contiguous"]),
        (read_only, ["read-only", "writable"]),
        (lambda n: filled(n).tolist(), ["list", "needed a numpy array"]),
    ],
    ids=["one_short", "empty", "float64", "strided", "read_only", "list"],
)
def test_read_into_refuses_and_writes_nothing(trace: gdn.Trace, make, fragments) -> None:
    buffer = make(trace.nelems("ON"))
    assert_refused(lambda: trace.read_into("ON", buffer), "'ON'", *fragments, error=ValueError)
    np.testing.assert_array_equal(buffer, SENTINEL)


def test_unknown_entry_names_those_there_are(trace: gdn.Trace) -> None:
    for call in (
        lambda: trace["O"],
        lambda: trace.nelems("O"),
        lambda: trace.read_into("O", filled(1)),
    ):
        with pytest.raises(KeyError, match=r"no trace entry 'O'.*ONN, OUT"):
            call()


def test_is_a_pytree_and_read_only(trace: gdn.Trace) -> None:
    doubled = jax.jit(lambda t: jax.tree.map(lambda x: 2 * x, t))(trace)
    assert isinstance(doubled, gdn.Trace)
    assert list(doubled) == list(trace)
    assert_same_bits(doubled["ONN"], 2 * trace["ONN"])
    assert not hasattr(trace, "__setitem__")
    assert "ON[2, 4, 8]" in repr(trace)
