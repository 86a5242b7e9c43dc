"""One layer on the GPU kernels: its weights in their layout, its step and its trace."""

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp

import pallas_kernels.support
from gdn_jax._core.backend import Matrix, choose
from gdn_jax.config import GDNConfig
from gdn_jax.layer.params import LARGE, GDNParams
from gdn_jax.layer.state import GDNState
from gdn_jax.layer.trace import Trace, trace_shapes
from gdn_jax.quant.kernel_layout import Q4Kernel, matrix, to_kernel
from gdn_jax.quant.q4array import Q4Array
from gdn_jax.types import Array
from pallas_kernels import layer, tuning
from pallas_kernels.kernels import middle
from pallas_kernels.kernels.delta_rule import delta_rule_decode
from pallas_kernels.place import Place


def backend_for(op: str, params: GDNParams, cfg: GDNConfig, backend: str | None) -> str:
    """The backend of ``op`` for these weights: the named one, or the best that can run it.

    Raises:
        UnknownNameError: no such backend.
        BackendUnavailableError: the named backend cannot run here, with the reason.
    """
    return choose(op, cfg, weights=matrices(params), backend=backend).backend


def matrices(params: GDNParams) -> list[Matrix]:
    """What the choice of a backend needs to know of a layer's weights."""
    return [matrix(name, getattr(params, name)) for name in (*LARGE, "in_proj_b", "in_proj_a")]


def params_to_kernel(params: GDNParams) -> GDNParams:
    """The weights with every Q4Array laid out for the GPU kernels, once; others as they are.

    Raises:
        ShapeError: an int4 matrix whose sizes are not multiples of 64.
    """
    laid_out = {
        name: to_kernel(weight)
        for name in LARGE
        if isinstance(weight := getattr(params, name), Q4Array)
    }
    return dataclasses.replace(params, **laid_out)


def delta_rule_as_stepped(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array
) -> tuple[Array, Array]:
    """The delta rule of B rows, with the same bits as in a step on the kernels.

    Each CTA has as many columns of S as in that step, which gives the same order of sums.
    """
    tile = tuning.middle_tile(len(v), v.shape[-1], pallas_kernels.support.has_clusters())
    token = (x[:, None] for x in (q, k, v, g, beta))
    o, S = delta_rule_decode(*token, jnp.float32(1), S, tile=tile)
    return o[:, 0], S


class KernelLayer:
    """A layer's weights in the form that the kernels take; create it outside a loop over tokens.

    ``step`` takes and returns the states of a stack, [L, N, ..], and changes one layer of it.
    """

    def __init__(self, params: GDNParams, cfg: GDNConfig) -> None:
        self.cfg = cfg
        params = params_to_kernel(params)
        large = {name: getattr(params, name) for name in LARGE}
        qkv, z, out = (w.blocks if isinstance(w, Q4Kernel) else w for w in large.values())
        self.weights = layer.Weights(
            qkv,
            z,
            params.in_proj_b,
            params.in_proj_a,
            params.conv_weight,
            middle.Small(params.A_log, params.dt_bias, params.norm_weight),
            out,
        )
        self.heads = middle.Heads(
            cfg.num_k_heads, cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim, cfg.norm_eps
        )

    def step(
        self,
        states: GDNState,
        index: int | Array,
        x: Array,
        *,
        slots: tuple[Array, Array] | None = None,
        trace: bool = False,
        summed: bool = True,
    ) -> tuple[Array, GDNState, Trace | None]:
        """One token of layer ``index`` for x [B, D], and its trace if ``trace``.

        Row b uses slot b, or reads slot ``slots[0][b]`` and writes ``slots[1][b]``; -1 is idle.
        y is [B, D] in the dtype of x; without ``summed``, the partial sums over slices of K that
        add up to it, float32 [splits, B, D], and no trace.
        """
        parts, S, hist, seen = layer.step(
            self.weights,
            x.astype(jnp.float32),
            states.S,
            states.conv_hist,
            Place(jnp.full((1,), index, jnp.int32), *(slots or ())),
            heads=self.heads,
            trace=trace,
            clusters=pallas_kernels.support.has_clusters(),
        )
        states = GDNState(S, hist)
        if not summed:
            return parts, states, None
        y = functools.reduce(operator.add, parts)
        seen = self._trace(seen, y, states, index) if trace else None
        return y.astype(x.dtype), states, seen

    def _trace(self, seen: Any, y: Array, states: GDNState, index: int | Array) -> Trace:
        entries = {**seen, "OUT": y, "S": states.S[index], "HIST": states.conv_hist[index]}
        return Trace(
            {
                name: entries[name].reshape(len(y), *shape)
                for name, shape in trace_shapes(self.cfg).items()
            }
        )
