"""A sum over the CTAs of a cluster through their shared memory, in MLIR; compute capability 9.0.

The interpreter cannot run it: interpreted, a CTA takes the whole head and needs no cluster.

Each CTA sends its number to all with stores that a barrier of the receiver counts. So no CTA waits
until the state's own stores have landed, as it would with a cluster barrier's release.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic import mlir as m
from pallas_kernels.mosaic.layouts import channels

THREADS = 128
_INBOX = THREADS + 2


def scratch(size: int) -> Any:
    """Shared memory for :func:`total`: the CTA's number once for every thread, at a multiple of 16
    bytes as vector stores need it; a barrier of 8 bytes; and the numbers that ``size`` CTAs send.
    """
    return plgpu.SMEM((_INBOX + size,), jnp.float32)


def open_mailbox(shared: Any) -> None:
    """Initialise this CTA's barrier and say so, without waiting for the others."""

    @m.inline(plgpu.RefType())
    def emit(shared: Any) -> None:
        with utils.when(m.less(_thread(), m.i32(1))):
            m.effect(
                "mbarrier.init.shared.b64 [$0], 1; fence.mbarrier_init.release.cluster;",
                _barrier(shared),
                constraints="r",
            )
        m.effect("barrier.cluster.arrive.relaxed.aligned;")

    emit(shared)


def wait() -> None:
    """Wait until every CTA of the cluster has initialised its barrier."""

    @m.inline()
    def emit() -> None:
        m.effect("barrier.cluster.wait.acquire.aligned;")

    emit()


def total(value: jax.Array, shared: Any, size: int) -> jax.Array:
    """The sum of a float32 scalar over ``size`` CTAs in their order; once, after :func:`wait`.

    A CTA ends only when all numbers have come, so none is sent to a CTA that has ended.
    """
    copies = lax.broadcast_in_dim(value, (THREADS,), ())
    shared[pl.ds(0, THREADS)] = plgpu.layout_cast(copies, channels(THREADS))

    @m.inline(plgpu.RefType())
    def emit(shared: Any) -> None:
        bar, thread = _barrier(shared), _thread()
        with utils.when(m.less(thread, m.i32(1))):
            m.effect(
                f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {4 * size};", bar, constraints="r"
            )
        with utils.when(m.less(thread, m.i32(size))):
            m.effect(
                "{ .reg .b32 rank, mine, there, bar; .reg .f32 own;"
                f" mad.lo.u32 mine, $1, 4, $0; ld.shared.f32 own, [mine + {-4 * THREADS}];"
                " mov.u32 rank, %cluster_ctarank;"
                " mad.lo.u32 mine, rank, 4, $0; add.u32 mine, mine, 8;"
                " mapa.shared::cluster.u32 there, mine, $1;"
                " mapa.shared::cluster.u32 bar, $0, $1;"
                " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], own, [bar]; }",
                bar,
                thread,
                constraints="r,r",
            )
        m.effect(
            "{ .reg .pred done; again:"
            " mbarrier.try_wait.parity.shared.b64 done, [$0], 0; @!done bra again; }",
            bar,
            constraints="r",
        )

    emit(shared)
    return functools.reduce(operator.add, (shared[_INBOX + i] for i in range(size)))


def _thread() -> Any:
    return m.mask(utils.thread_idx(), THREADS - 1)


def _barrier(shared: Any) -> Any:
    address = llvm.ptrtoint(m.i32_type(), utils.memref_ptr(shared))
    return arith.addi(address, m.i32(4 * THREADS))
