"""The causal convolution of a layer over many tokens."""

import jax
import jax.numpy as jnp

from gdn_jax._core.backend import select_backend
from gdn_jax._core.checks import check_array
from gdn_jax.errors import ShapeError
from gdn_jax.types import Array
from pallas_kernels.kernels.causal_conv import causal_conv


def causal_conv1d(
    x: Array, hist: Array, weight: Array, *, backend: str | None = None
) -> tuple[Array, Array]:
    """Depthwise causal convolution and SiLU over T tokens, from and to a history.

    ``out[t, c] = silu(sum_j weight[c, j] · ext[t + j, c])`` with ``ext = [hist; x]``; the new
    history is the last W-1 frames of ``ext``, so T < W-1 shifts it.

    Args:
        x: [B, T, C] float32, the convolution's input, T >= 1.
        hist: [B, W-1, C] float32, oldest first.
        weight: [C, W] float32; tap j multiplies window entry j, oldest first.
        backend: None takes pallas on a CUDA GPU for W of 2 to 4 and C a multiple of 64, else xla; a
            name runs or raises. Under differentiation both run the equations of xla.

    Returns:
        out [B, T, C] and hist [B, W-1, C], float32.

    Raises:
        ShapeError: an argument of the wrong shape, rank or dtype, or T = 0.
        BackendUnavailableError: the named backend cannot run here.
    """
    op = "causal_conv1d"
    check_array(op, "weight", weight, [("C", None), ("W", None)], [jnp.float32])
    C, W = weight.shape
    check_array(op, "x", x, [("B", None), ("T", None), ("C", C)], [jnp.float32])
    B, T, _ = x.shape
    if T == 0:
        raise ShapeError(f"{op}: x has shape {x.shape}; needed at least one token, T >= 1")
    check_array(op, "hist", hist, [("B", B), ("W-1", W - 1), ("C", C)], [jnp.float32])
    run = _conv_pallas if select_backend(op, backend=backend, W=W, C=C) == "pallas" else _conv_xla
    with jax.named_scope(op):
        return run(jnp.asarray(x), jnp.asarray(hist), jnp.asarray(weight))


def _conv_xla(x: Array, hist: Array, weight: Array) -> tuple[Array, Array]:
    T, W = x.shape[1], weight.shape[1]
    ext = jnp.concatenate([hist, x], axis=1)
    # Summed over an axis as a step sums its window, for the same bits; prefill, which needs no
    # such bits, adds shifted products instead.
    windows = jnp.stack([ext[:, j : j + T] for j in range(W)], axis=-1)
    return jax.nn.silu(jnp.sum(windows * weight[None, None], axis=-1)), ext[:, T:]


@jax.custom_jvp
def _conv_pallas(x: Array, hist: Array, weight: Array) -> tuple[Array, Array]:
    return causal_conv(x, hist, weight)


@_conv_pallas.defjvp
def _conv_pallas_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]):
    return jax.jvp(_conv_xla, primals, tangents)
