"""Where a CTA of the int4 kernel puts its sums: partial ones, or those of a whole cluster."""

import functools
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels import mlir as m
from pallas_kernels.q4_fragments import SAME, THREADS, Cta, Share
from pallas_kernels.q4_layout import TILE


def write_partial_sums(
    share: Share, have: Any, x: Any, w: Any, parts: Any, digits: Any, factors: Any
) -> None:
    """``parts[r, n] = sum_k w[n, k]·x[r, k]`` over the CTA's columns.

    Args:
        have: int32 [128], all the same: rows of x that there are, the rest is left alone.
        x: float32 [rows, 64·steps] in global memory, as all references but the last two.
        w: blocks [tiles, steps, 9, 64].
        parts: float32 [rows, 64·tiles].
        digits, factors: shared memory of the shapes above.
    """

    @m.inline(SAME, *[plgpu.RefType()] * 5)
    def emit(have: Any, x: Any, w: Any, parts: Any, digits: Any, factors: Any) -> None:
        cta = Cta(share, m.elements(have.registers.item())[0], x, w, digits, factors)
        stride = m.stride(parts)

        def store(tile: Any, value: Any, r: Any, n: Any, inside: Any) -> None:
            column = arith.addi(n, arith.muli(tile, m.i32(TILE)))
            with utils.when(inside):
                at = arith.addi(arith.muli(r, m.i32(stride)), column)
                llvm.store(value, m.at(parts, at, m.f32()))

        cta.run(store)

    emit(have, x, w, parts, digits, factors)


def write_sums(share: Share, ranks: int, have: Any, x: Any, w: Any, residual: Any, *refs: Any):
    """The same for a cluster of ``ranks`` CTAs, one K slice each, whose partial sums are added.

    Row r of x is added up in CTA r % ranks, in order of the columns and the residual last: every
    CTA writes its sums of that row into the CTA's shared memory. All wait for all before the first
    such write and after the last, so a CTA lives as long as others write to it.

    Args:
        residual: float32 [rows, 64·tiles] or None.
        refs: y float32 [rows, 64·tiles]; digits, factors and inbox in shared memory.
    """
    residuals = () if residual is None else (residual,)
    count = 2 + len(residuals) + len(refs)

    @m.inline(SAME, *[plgpu.RefType()] * count)
    def emit(have: Any, x: Any, w: Any, *refs: Any) -> None:
        *residual, y, digits, factors, inbox = refs
        m.effect("barrier.cluster.arrive.relaxed.aligned;")
        cta = Cta(share, m.elements(have.registers.item())[0], x, w, digits, factors)
        rank = m.asm(m.i32_type(), [], "mov.u32 $0, %cluster_ctarank;", "=r")
        base, width = llvm.ptrtoint(m.i32_type(), utils.memref_ptr(inbox)), TILE * share.tiles
        owned, stride = range(-(-share.rows // ranks)), m.stride(y)
        places = [(s, first) for s in owned for first in range(0, width, THREADS)]

        def place(slot: int, first: int) -> tuple[Any, Any, Any]:
            """The thread's column, where it is in y, and whether it is there."""
            r, n = arith.addi(rank, m.i32(slot * ranks)), arith.addi(cta.thread, m.i32(first))
            inside = arith.andi(m.less(r, cta.have), m.less(n, m.i32(width)))
            return n, arith.addi(arith.muli(r, m.i32(stride)), n), inside

        def last_terms() -> list[Any]:
            if not residual:
                return []
            terms = []
            for slot, first in places:
                _, at, inside = place(slot, first)
                at = arith.select(inside, at, m.i32(0))
                terms.append(llvm.load(m.f32(), m.at(residual[0], at, m.f32())))
            return terms

        def send(tile: Any, value: Any, r: Any, n: Any, inside: Any) -> None:
            owner, slot = arith.remui(r, m.i32(ranks)), arith.divui(r, m.i32(ranks))
            row = arith.addi(arith.muli(slot, m.i32(ranks)), rank)
            column = arith.addi(n, arith.muli(tile, m.i32(TILE)))
            at = arith.addi(arith.muli(row, m.i32(width)), column)
            at = arith.addi(base, arith.shli(at, m.i32(2)))
            with utils.when(inside):
                m.effect(
                    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1;"
                    " st.shared::cluster.f32 [there], $2; }",
                    *(at, owner, value),
                    constraints="r,r,f",
                )

        terms = cta.run(
            send, early=last_terms, ready=lambda: m.effect("barrier.cluster.wait.aligned;")
        )
        m.effect("barrier.cluster.arrive.release.aligned;")
        m.effect("barrier.cluster.wait.acquire.aligned;")
        for number, (slot, first) in enumerate(places):
            n, at, inside = place(slot, first)
            with utils.when(inside):
                sent = [
                    llvm.load(
                        m.f32(),
                        m.at(inbox, arith.addi(n, m.i32((slot * ranks + s) * width)), m.f32()),
                    )
                    for s in range(ranks)
                ]
                total = functools.reduce(arith.addf, [*sent, *terms[number : number + 1]])
                llvm.store(total, m.at(y, at, m.f32()))

    emit(have, x, w, *residuals, *refs)
