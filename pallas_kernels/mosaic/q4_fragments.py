"""What a CTA of the int4 kernel does, in MLIR: see q4_gemv for the scheme.

The interpreter cannot run it; the tests repeat its index equations in NumPy.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, scf

from pallas_kernels.mosaic import mlir as m
from pallas_kernels.q4_layout import BLOCK, TILE

THREADS, WARPS = 128, 4
BIAS, LOWEST = 127, -90
"""The exponent bias of float32, and the lowest exponent that a slice is scaled by."""

SAME = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
"""The layout of a number that every thread has."""

_INF, _NAN = 0x7F800000, 0x7FC00000
_WORDS = BLOCK[0] * BLOCK[1]


class Share(NamedTuple):
    """What one CTA does: ``rows`` of x times ``tiles`` · 64 rows of weights over ``steps`` · 64
    columns, weights requested in chunks of ``chunk`` steps, ``ahead`` chunks before their use.
    """

    rows: int
    tiles: int
    steps: int
    chunk: int
    ahead: int

    @property
    def sharing(self) -> int:
        """Rows of x in the eight columns of a product."""
        return min(self.rows, 2)


class Cta:
    """One CTA's registers and references while its code is emitted."""

    def __init__(self, share: Share, have: Any, matrix: Any, *refs: Any) -> None:
        self.share, self.have = share, have
        self.x, self.digits, self.factors, *rest = refs
        w, parts = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        self.w, self.w_stride = m.pick(matrix, map(m.pointer, w)), m.stride(w[0])
        self.parts = m.pick(matrix, map(m.pointer, parts))
        self.parts_stride = m.pick(matrix, (m.i32(m.stride(ref)) for ref in parts))
        self.thread = m.mask(utils.thread_idx(), THREADS - 1)
        self.warp, self.lane = arith.shrui(self.thread, m.i32(5)), m.mask(self.thread, 31)
        self.quad = m.mask(self.thread, 3)

    def run(self) -> None:
        """All tiles."""
        share = self.share
        chunks = share.steps // share.chunk
        first_rows = self._load_x(0, 0)
        queue = [self._load(*map(m.i32, divmod(i, chunks))) for i in range(share.ahead)]
        # Without this the compiler moves these loads after the wait for x.
        utils.warpgroup_barrier()
        self._store_digits(first_rows)
        utils.warpgroup_barrier()
        none = [m.zero()] * (2 * len(range(0, share.rows, 2)))
        if share.tiles * chunks == share.ahead == 1:
            self._put(self._add_products(none, queue[0], m.i32(0)), m.i32(0))
            return

        def following(tile: Any, chunk: Any) -> tuple[Any, Any]:
            chunk = arith.addi(chunk, m.i32(1))
            past = arith.cmpi(arith.CmpIPredicate.eq, chunk, m.i32(chunks))
            next_tile = arith.addi(tile, m.i32(1))
            return arith.select(past, next_tile, tile), arith.select(past, m.i32(0), chunk)

        size = 2 * share.chunk
        places = [m.i32(0)] * 2 + list(map(m.i32, divmod(share.ahead, chunks)))
        start = [*places, *none, *(v for part in queue for v in part)]
        loop = scf.ForOp(m.i32(0), m.i32(share.tiles * chunks), m.i32(1), start)
        with ir.InsertionPoint(loop.body):
            tile, chunk, tile_ahead, chunk_ahead, *values = loop.inner_iter_args
            sums, queued = values[: len(none)], values[len(none) :]
            new = m.either(
                m.less(tile_ahead, m.i32(share.tiles)),
                lambda: self._load(tile_ahead, chunk_ahead),
                queued[:size],
            )
            sums = self._add_products(sums, queued[:size], chunk)

            def finish() -> list[Any]:
                self._put(sums, tile)
                return none

            last = arith.cmpi(arith.CmpIPredicate.eq, chunk, m.i32(chunks - 1))
            sums = m.either(last, finish, sums)
            places = [*following(tile, chunk), *following(tile_ahead, chunk_ahead)]
            scf.yield_([*places, *sums, *queued[size:], *new])

    def _load(self, tile: Any, chunk: Any) -> list[Any]:
        """A lane's weights and scales of a chunk: vectors of int32, four and one or two a step.

        The scales are pairs of float16, rows r and r + 8: of the lane's own group where its two
        columns of the product belong to one group, else of both groups.
        """
        vector = functools.partial(ir.VectorType.get, element_type=m.i32_type())
        tile = arith.muli(arith.extui(m.i64_type(), tile), m.i64(self.w_stride))
        chunk = arith.muli(chunk, m.i32(self.share.chunk * _WORDS))
        first = m.offset(m.offset(self.w, tile), chunk)
        out = []
        for p in range(self.share.chunk):
            base = m.offset(first, m.i32(p * _WORDS))
            own = m.offset(base, arith.shli(self.thread, m.i32(2)))
            out.append(llvm.load(vector([4]), own, alignment=16))
            size = self.share.sharing
            pair = m.offset(base, m.mask(arith.shrui(self.thread, m.i32(1)), -size))
            out.append(
                llvm.load(vector([size]), m.offset(pair, m.i32(8 * TILE)), alignment=4 * size)
            )
        return out

    def _add_products(self, sums: list[Any], loaded: list[Any], chunk: Any) -> list[Any]:
        """``sums + scales · (weights · digits)``: of each pair of rows of x two float32, the rows r
        and r + 8 of the weights.
        """
        start = arith.muli(chunk, m.i32(self.share.chunk * THREADS))
        start = arith.addi(start, arith.shli(self.lane, m.i32(2)))
        own, zero, sums = m.offset(m.pointer(self.digits), start), [m.i32(0)] * 4, list(sums)
        for n, (w, s) in enumerate(zip(loaded[::2], loaded[1::2], strict=True)):
            # Without this the compiler takes registers for the digits of all steps.
            m.hold()
            w = m.elements(w)
            low = [m.mask(arith.shli(word, m.i32(4)), 0xF0F0F0F0) for word in w]
            high = [m.mask(word, 0xF0F0F0F0) for word in w]
            scales = [m.halves(pair) for pair in m.elements(s)]
            for q in range(len(sums) // 2):
                at = (q * self.share.steps + n) * THREADS
                fragment = llvm.load(m.vector(4), m.offset(own, m.i32(at)), alignment=16)
                b = m.elements(fragment)
                if self.share.sharing == 1:
                    totals = [m.mma(m.mma(zero, low, b[:2]), high, b[2:])]
                else:
                    totals = [m.mma(zero, low[i : i + 2] + high[i : i + 2], b[i:]) for i in (0, 2)]
                for total, pair in zip(totals, scales, strict=True):
                    for half, scale in enumerate(pair):
                        lower, upper = total[2 * half : 2 * half + 2]
                        both = arith.addi(arith.shli(upper, m.i32(8)), lower)
                        acc = sums[2 * q + half]
                        sums[2 * q + half] = llvm.intr_fma(arith.sitofp(m.f32(), both), scale, acc)
        return sums

    def _put(self, sums: list[Any], tile: Any) -> None:
        """The two lanes of a row of x, or all four, add what they have; one writes row r of the
        weights, the other row r + 8.
        """
        odd = arith.cmpi(arith.CmpIPredicate.ne, m.mask(self.quad, 1), m.i32(0))
        n = arith.addi(arith.shli(self.warp, m.i32(4)), arith.shrui(self.lane, m.i32(2)))
        n = arith.addi(n, arith.shli(m.mask(self.quad, 1), m.i32(3)))
        n = arith.addi(n, arith.muli(tile, m.i32(TILE)))
        for q in range(len(sums) // 2):
            factor = llvm.load(
                m.f32(), m.at(self.factors, arith.addi(self.quad, m.i32(4 * q)), m.f32())
            )
            first, second = (arith.mulf(value, factor) for value in sums[2 * q : 2 * q + 2])
            mine, other = arith.select(odd, second, first), arith.select(odd, first, second)
            total = arith.addf(mine, utils.shfl_bfly(other, 1))
            r = arith.addi(arith.shrui(self.quad, m.i32(1)), m.i32(2 * q))
            if self.share.sharing == 1:
                total = arith.addf(total, utils.shfl_bfly(total, 2))
            with utils.when(m.less(r, self.have)):
                at = arith.addi(arith.muli(r, self.parts_stride), n)
                llvm.store(total, m.offset(self.parts, at))

    def _store_digits(self, next_values: list[Any]) -> None:
        """Write the digits of x: a warp takes one row at a time, and first requests the next."""
        for r in range(0, self.share.rows, WARPS):
            values = next_values
            m.hold()
            if r + WARPS < self.share.rows:
                next_values = self._load_x(r + WARPS, 0)
            with utils.when(m.less(arith.addi(self.warp, m.i32(r)), self.have)):
                self._store_row(r, values)

    def _step(self, piece: int) -> Any:
        """The step of x that the lane takes, ``lane // 4 + piece``, or the last one."""
        step = arith.addi(arith.shrui(self.lane, m.i32(2)), m.i32(piece))
        return arith.minui(step, m.i32(self.share.steps - 1))

    def _load_x(self, first: int, piece: int) -> list[Any]:
        """Of row ``first + warp`` and the lane's step the columns 4·i + 16·u + b, i of the lane."""
        row = arith.addi(self.warp, m.i32(first))
        row = arith.minui(row, arith.subi(self.have, m.i32(1)))
        at = arith.addi(arith.shli(self._step(piece), m.i32(6)), arith.shli(self.quad, m.i32(2)))
        base = m.at(self.x, arith.addi(arith.muli(row, m.i32(m.stride(self.x))), at), m.f32())
        runs = [utils.getelementptr(base, [16 * u], m.f32()) for u in range(4)]
        loaded = [llvm.load(m.vector(4, m.f32()), run, alignment=16) for run in runs]
        return [value for run in loaded for value in m.elements(run)]

    def _store_row(self, first: int, values: list[Any]) -> None:
        """Digits of row ``first + warp`` as the right operand's fragments, [steps, 32 lanes, 4].

        The columns ``64·p + 32·c + 16·h + 4·i + b`` become one word for each digit d, for lane
        ``4·(4·j + d) + i`` where j is c for one row of x and r % 2 for two. It is word 2·h + c of
        that lane, and word 2·h + 1 - c is zero, for one row; for two it is word 2·c + h.

        Of more than eight steps all but ``values`` is loaded twice, which saves registers.
        """
        share, pieces = self.share, range(0, self.share.steps, 8)
        peak = _largest(values)
        for piece in pieces[1:]:
            m.hold()
            peak = arith.maximumf(peak, _largest(self._load_x(first, piece)))
        peak = arith.bitcast(m.i32_type(), peak)
        peak = m.asm(m.i32_type(), [peak], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r")
        e = arith.subi(arith.shrui(peak, m.i32(23)), m.i32(BIAS - 1))
        e = arith.maxsi(e, m.i32(LOWEST))
        scale = arith.shli(arith.subi(m.i32(BIAS + 30), e), m.i32(23))
        scale = arith.bitcast(m.f32(), scale)
        row = arith.addi(self.warp, m.i32(first))
        self._store_factors(row, peak, e)
        place = arith.muli(arith.shrui(row, m.i32(1)), m.i32(THREADS * share.steps))
        place = arith.addi(place, arith.shli(m.mask(row, 1), m.i32(6)))
        place = arith.addi(place, arith.shli(self.quad, m.i32(2)))
        for piece in pieces:
            if piece:
                m.hold()
                values = self._load_x(first, piece)
            at = arith.addi(place, arith.shli(self._step(piece), m.i32(7)))
            base = m.at(self.digits, at, m.i32_type())
            runs = [_digits(values[i : i + 4], scale) for i in range(0, 16, 4)]
            for d, words in enumerate(zip(*runs, strict=True)):
                if share.sharing == 2:
                    m.store_four(base, 16 * d, words)
                else:
                    none = m.i32(0)
                    m.store_four(base, 16 * d, (words[0], none, words[1], none))
                    m.store_four(base, 16 * d + 64, (none, words[2], none, words[3]))

    def _store_factors(self, row: Any, peak: Any, e: Any) -> None:
        """``2**(16·j + e - 34)`` for the digits 2·j and 2·j + 1, NaN where x is not finite."""
        lanes = 4 // self.share.sharing
        bits = arith.addi(arith.shli(m.mask(self.lane, 1), m.i32(4)), m.i32(BIAS - 34))
        bits = arith.shli(arith.addi(bits, e), m.i32(23))
        bits = arith.select(m.less(peak, m.i32(_INF)), bits, m.i32(_NAN))
        with utils.when(m.less(self.lane, m.i32(lanes))):
            at = arith.addi(arith.muli(row, m.i32(lanes)), self.lane)
            llvm.store(bits, m.at(self.factors, at, m.i32_type()))


def _largest(values: list[Any]) -> Any:
    """The largest magnitude, or NaN."""
    values = [math.absf(value) for value in values]
    while len(values) > 1:
        values = [arith.maximumf(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _digits(values: Sequence[Any], scale: Any) -> list[Any]:
    """Four values' digits: word d holds digit d of each."""
    # Adding 128 to the three lower digits makes each byte of the sum a digit, the lower ones + 128.
    a, b, c, d = (
        arith.addi(
            m.asm(m.i32_type(), [arith.mulf(value, scale)], "cvt.rni.s32.f32 $0, $1;", "=r,f"),
            m.i32(0x00808080),
        )
        for value in values
    )
    # The 4 x 4 transpose of their bytes.
    low, high = ([m.prmt(a, b, n), m.prmt(c, d, n)] for n in (0x5140, 0x7362))
    words = [m.prmt(x, y, n) for x, y in (low, high) for n in (0x5410, 0x7632)]
    return [*(arith.xori(word, m.i32(0x80808080)) for word in words[:3]), words[3]]


def write_partial_sums(share: Share, have: Any, matrix: Any, *refs: Any) -> None:
    """``parts[r, n] = sum_k w[n, k]·x[r, k]`` over the CTA's columns, for one of some matrices.

    Args:
        have: int32 [128], all the same: rows of x of the CTA; what lies beyond is left alone.
        matrix: int32 [128], all the same: which of the matrices is the CTA's.
        refs: x float32 [rows, 64·steps] in global memory; the digits and factors in shared memory;
            for every matrix w, blocks [tiles, steps, 9, 64]; for every one parts, float32
            [rows, 64·tiles].
    """

    @m.inline(SAME, SAME, *[plgpu.RefType()] * len(refs))
    def emit(have: Any, matrix: Any, *refs: Any) -> None:
        scalars = (m.elements(same.registers.item())[0] for same in (have, matrix))
        Cta(share, *scalars, *refs).run()

    emit(have, matrix, *refs)
