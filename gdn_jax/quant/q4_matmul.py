"""The product of float32 activations and int4 weights, in two conventions."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gdn_jax._core.backend import choose
from gdn_jax._core.checks import check_array
from gdn_jax.errors import UnknownNameError
from gdn_jax.quant import dense
from gdn_jax.quant.kernel_layout import (
    Q4Kernel,
    check_int4,
    from_kernel,
    kernel_product,
    matrix,
    to_kernel,
)
from gdn_jax.quant.q4array import GROUP, SHIFTS, WORDS, Q4Array, dequantize, unpack
from gdn_jax.types import Array

ACTIVATIONS = ("f32", "q8")


def q4_matmul(
    x: Any, w: Q4Array | Q4Kernel, *, activations: str = "f32", backend: str | None = None
) -> Array:
    """``y = w·x`` for int4 weights: x [.., K] float32, w [N, K] -> y [.., N] float32.

    With groups ``g`` of 32 columns, integers ``n`` and scales ``s`` of :class:`Q4Array`:

    - ``"f32"``: ``y = sum_g s_g · sum_j n_j·x_j``, everything in float32: the float32 product with
      ``dequantize(w)`` up to the order of its sums. More than eight rows are one dot, which
      holds the float32 weights in memory while it runs.
    - ``"q8"``: the activations become 8-bit integers first (:func:`quantize_q8`), then
      ``y = sum_g (s_g·d_g) · sum_j n_j·q_j`` with the inner sum exact in int32. About 1 % away
      from ``"f32"``: choose it to compare with a system that quantises its activations.

    A row of x that is not finite gives a row of y that is not finite, and changes no other row.

    The backend ``"pallas"`` has a GPU kernel for ``"f32"``, N and K multiples of 64, with x exact
    to 2**-30 of its row's largest magnitude. It reads a Q4Kernel in place; a Q4Array is laid out
    anew in each call, which costs more than the product. Under ``vmap`` it makes one call after
    another.

    Args:
        x: activations.
        w: weights without leading axes; use ``vmap`` for a stack. A Q4Kernel is in the
            kernel's layout, which ``"xla"`` undoes in each call.
        activations: ``"f32"`` or ``"q8"``.
        backend: None takes the kernel for a Q4Kernel if :func:`gdn_jax.select_backend` says that
            it can run, else ``"xla"``; a named one runs or raises.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype.
        UnknownNameError: no such convention or backend.
        BackendUnavailableError: the named backend cannot run here.
    """
    op = "q4_matmul"
    check_int4(op, "w", w, [("N", None), ("K", None)])
    lead = [("..", None)] * (np.ndim(x) - 1)
    check_array(op, "x", x, [*lead, ("K", w.shape[-1])], [jnp.float32])
    if activations not in ACTIVATIONS:
        raise UnknownNameError(
            f"{op}: no activations {activations!r}; there are {', '.join(ACTIVATIONS)}"
        )
    f32 = activations == "f32"
    obstacle = None if f32 else f"the kernel takes activations 'f32', not {activations!r}"
    chosen = choose(op, weights=[matrix("w", w)], backend=backend, obstacle=obstacle)
    if chosen.backend == "pallas":
        w = w if isinstance(w, Q4Kernel) else to_kernel(w)
        y = kernel_product(x.reshape(-1, x.shape[-1]), w)
        return y.reshape(*x.shape[:-1], w.shape[0])
    return matmul_f32(x, w) if f32 else matmul_q8(x, exchange_form(w))


def exchange_form(w: Q4Array | Q4Kernel) -> Q4Array:
    """``w`` in exchange form: a Q4Array as it is, a Q4Kernel converted."""
    return from_kernel(w) if isinstance(w, Q4Kernel) else w


def matmul_f32(x: Array, w: Q4Array | Q4Kernel) -> Array:
    """The ``"f32"`` convention on XLA, unchecked: x [.., K], w [N, K] -> [.., N]."""
    # Tied to x, so that no loop over tokens unpacks the weights once and keeps them in float32.
    x, tied = lax.optimization_barrier((x, w))
    weights = exchange_form(tied)
    if dense.few_rows(x):
        return lax.platform_dependent(x, weights, cpu=_by_groups, default=_dequantised)
    return _dequantised(x, weights)


def matmul_q8(x: Array, w: Q4Array) -> Array:
    """The ``"q8"`` convention on XLA, unchecked; eight rows at a time, to bound its memory."""

    def row(x: Array) -> Array:
        q, d = quantize_q8(x)
        q, tied = lax.optimization_barrier((q, w))
        dots = jnp.sum(q.reshape(1, -1, GROUP) * unpack(tied), axis=-1)
        scales = tied.scales.astype(jnp.float32) * d[None].astype(jnp.float32)
        return jnp.sum(dots.astype(jnp.float32) * scales, axis=-1)

    rows = lax.map(row, x.reshape(-1, x.shape[-1]), batch_size=8)
    return rows.reshape(*x.shape[:-1], w.shape[0])


def quantize_q8(x: Array) -> tuple[Array, Array]:
    """Activations as GGUF ``Q8_0`` has them: x [.., K] -> q int32 [.., K], d float16 [.., K/32].

    Per group of 32, ``d = max|x| / 127`` and ``q = round(x · (1/d))``, halves away from zero, in
    -127..127; d is rounded to float16 after q is taken. A group of zeros, or of numbers so small
    that d is subnormal in float32, may give zeros. A group that is not finite, or with
    ``max|x|/127`` beyond float16, has a d that is not finite.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    # A divisor that XLA knows would become a product with its reciprocal, which rounds otherwise.
    d = largest / lax.optimization_barrier(jnp.full_like(largest, 127))
    inverse = jnp.where(jnp.isfinite(1 / d), 1 / d, 0)
    q = lax.round(groups * inverse[..., None], lax.RoundingMethod.AWAY_FROM_ZERO)
    return q.astype(jnp.int32).reshape(x.shape), _round_to_f16(d).astype(jnp.float16)


def _round_to_f16(d: Array) -> Array:
    """float32 rounded to a value of float16, the same if XLA drops the conversion to it and back.

    On a GPU XLA does so where the two meet. It keeps ``reduce_precision``, which however turns
    float16's subnormals into zeros.
    """
    subnormal = lax.round(d * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    normal = lax.reduce_precision(d, exponent_bits=5, mantissa_bits=10)
    return jnp.where(jnp.abs(d) < 2.0**-14, subnormal, normal)


def _dequantised(x: Array, w: Q4Array) -> Array:
    """On a GPU one loop from int4 to the sum; more than eight rows need the float32 weights."""
    return (dense.products if dense.few_rows(x) else dense.matmul)(x, dequantize(w))


def _by_groups(x: Array, w: Q4Array) -> Array:
    """``sum_g s_g · sum_j n_j·x_j`` for the CPU, where XLA would store the unpacked integers.

    The 32 terms of all groups are added in pairs, which is one loop over the words; the sum over
    groups stands apart from it, so that its order is always the same.
    """
    columns = x.reshape(*x.shape[:-1], 1, -1, 2, WORDS, 4)
    lead = range(x.ndim - 1)
    words = lax.expand_dims(w.packed.reshape(*w.scales.shape, WORDS), lead)
    terms = []
    for h, i, b in itertools.product(range(2), range(WORDS), range(4)):
        integers = jnp.right_shift(jnp.left_shift(words[..., i], 28 - int(SHIFTS[h, b])), 28)
        terms.append(columns[..., h, i, b] * integers.astype(jnp.float32))
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    groups = terms[0] * lax.expand_dims(w.scales, lead).astype(jnp.float32)
    return jnp.sum(lax.optimization_barrier(groups), axis=-1)
