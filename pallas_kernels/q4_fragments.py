"""The parts of the int4 kernel that Pallas has no words for, in MLIR: see q4_gemv for the scheme.

The interpreter cannot run them; the tests repeat their index equations in NumPy.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

THREADS, WARPS = 128, 4
BIAS, LOWEST = 127, -90
"""The exponent bias of float32, and the lowest exponent that a slice is scaled by."""


def _layout(*tiling: tuple[int, ...], warps: Any, lanes: tuple[Any, ...]) -> Any:
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=(warps,), lane_dims=lanes, vector_dim=-1
    )


_ALL = plgpu.Replicated
ACC = plgpu.Layout.MMA_ACC(jnp.int8)
WORDS = _layout((4, 128), (4,), warps=-3, lanes=(-2,))
DIGITS = _layout((128,), (4,), warps=_ALL(WARPS), lanes=(-2,))
SCALES = {
    1: _layout((4, 16), (1,), warps=-3, lanes=(-2, _ALL(2))),
    2: _layout((4, 16), (2,), warps=-3, lanes=(-2, _ALL(4))),
}
"""By rows of x in a product: the scale of the lane's own group, or those of both groups."""


def _inline(*types: Any, returns: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """plgpu.inline_mgpu, whose function is called without its context."""
    return plgpu.inline_mgpu(arg_types=types, return_type=returns)


def barrier() -> None:
    """Wait for the CTA's four warps."""

    @_inline()
    def emit(ctx: Any) -> None:
        utils.warpgroup_barrier()

    emit()


def store_peak(x: Any, peaks: Any, r: int) -> None:
    """Each warp's largest magnitude bits of row r go to ``peaks[4·r + warp]``."""

    @_inline(*[plgpu.RefType()] * 2)
    def emit(ctx: Any, x: Any, peaks: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        count, units = _units(x)
        bits = []
        for unit in units:
            four = _load_four(x, arith.minui(unit, _i32(count - 1)))
            bits += [_mask(arith.bitcast(i32, value), 0x7FFFFFFF) for value in four]
        peak = functools.reduce(arith.maxui, bits)
        peak = _asm(i32, [peak], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r")
        thread = _mask(utils.thread_idx(), THREADS - 1)
        first = arith.cmpi(arith.CmpIPredicate.eq, _mask(thread, 31), _i32(0))
        with utils.when(first):
            slot = arith.addi(arith.shrui(thread, _i32(5)), _i32(WARPS * r))
            llvm.store(peak, utils.getelementptr(utils.memref_ptr(peaks), [slot], i32))

    emit(x, peaks)


def store_digits(x: Any, peaks: Any, digits: Any, r: int, sharing: int) -> None:
    """Row r's digits as the right operand's fragments: [steps, 128], four words for each lane.

    The four columns of unit ``16·p + 8·c + 4·h + i`` become one word for each digit d, for lane
    ``4·(4·j + d) + i`` where j is c for one row of x and r % 2 for two. Word 2·h + c of that lane
    is this one and word 2·h + 1 - c zero for one row; for two it is word 2·c + h.
    """

    @_inline(*[plgpu.RefType()] * 3)
    def emit(ctx: Any, x: Any, peaks: Any, digits: Any) -> None:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        at = utils.getelementptr(utils.memref_ptr(peaks), [_i32(WARPS * r)], i32)
        four = llvm.load(ir.VectorType.get((WARPS,), i32), at, alignment=16)
        peak = functools.reduce(
            arith.maxui, (llvm.extractelement(four, _i32(i)) for i in range(WARPS))
        )
        e = arith.subi(arith.shrui(peak, _i32(23)), _i32(BIAS - 1))
        power = arith.subi(_i32(BIAS + 30), arith.maxsi(e, _i32(LOWEST)))
        scale = arith.bitcast(f32, arith.shli(power, _i32(23)))
        count, units = _units(x)
        for number, unit in enumerate(units):
            inside = arith.cmpi(arith.CmpIPredicate.ult, unit, _i32(count))
            if count >= THREADS * (number + 1):
                _digits_of(x, digits, scale, unit, r, sharing)
            else:
                with utils.when(inside):
                    _digits_of(x, digits, scale, unit, r, sharing)

    emit(x, peaks, digits)


def add_products(acc: Any, words: Any, digits: Any, scales: Any, sharing: int) -> Any:
    """``acc + scales · (weights · digits)`` over 64 columns: acc float32 [64, 8] in ACC.

    Args:
        words: int32 [4, 128] in WORDS: a lane's two fragments of int8 weights.
        digits: int32 [128] in DIGITS: a lane's two fragments of the activations.
        scales: int32 [4, 16] in SCALES[sharing]: pairs of float16, rows r and r + 8.
        sharing: rows of x in the eight columns, 1 or 2.
    """

    returns = plgpu.ShapeDtypeStruct((64, 8), jnp.float32, layout=ACC)

    @_inline(ACC, WORDS, DIGITS, SCALES[sharing], returns=returns)
    def emit(ctx: Any, acc: Any, words: Any, digits: Any, scales: Any) -> Any:
        w, b, s = (_lane_values(x) for x in (words, digits, scales))
        low = [_mask(arith.shli(word, _i32(4)), 0xF0F0F0F0) for word in w]
        high = [_mask(word, 0xF0F0F0F0) for word in w]
        zero = [_i32(0)] * 4
        if sharing == 1:
            sums = [_mma(_mma(zero, low, b[:2]), high, b[2:])]
        else:
            sums = [_mma(zero, low[n : n + 2] + high[n : n + 2], b[n : n + 2]) for n in (0, 2)]
        registers = acc.registers.copy()
        for total, pair in zip(sums, s, strict=True):
            for half, scale in enumerate(_halves(pair)):
                place = registers.reshape(-1)
                place[half] = _scaled_add(place[half], total[2 * half : 2 * half + 2], scale)
        return fragmented_array.FragmentedArray(
            _registers=registers, _layout=acc.layout, _is_signed=None
        )

    return emit(acc, words, digits, scales)


def _lane_values(x: Any) -> list[Any]:
    """The lane's elements of a fragmented array, in order."""
    return [
        llvm.extractelement(register, _i32(i))
        for register in x.registers.flatten()
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def _mma(acc: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    """``acc + a·b`` for a warp: int8 [16, 32] times [32, 8], int32 sums."""
    i32 = ir.IntegerType.get_signless(32)
    out = _asm(
        llvm.StructType.get_literal([i32] * 4),
        [*a, *b, *acc],
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        ",".join(["=r"] * 4 + ["r"] * 10),
    )
    return [llvm.extractvalue(i32, out, [i]) for i in range(4)]


def _halves(pair: Any) -> list[Any]:
    """The two float16 of a word, in float32."""
    f16, f32 = ir.F16Type.get(), ir.F32Type.get()
    both = llvm.bitcast(ir.VectorType.get((2,), f16), pair)
    return [arith.extf(f32, llvm.extractelement(both, _i32(i))) for i in range(2)]


def _scaled_add(register: Any, sums: list[Any], scale: Any) -> Any:
    f32 = ir.F32Type.get()
    for i, total in enumerate(sums):
        old = llvm.extractelement(register, _i32(i))
        new = llvm.intr_fma(arith.sitofp(f32, total), scale, old)
        register = llvm.insertelement(register, new, _i32(i))
    return register


def _prmt(a: Any, b: Any, order: int) -> Any:
    """Four of the eight bytes of a and b."""
    i32 = ir.IntegerType.get_signless(32)
    return _asm(i32, [a, b, _i32(order)], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def _digits_of(x: Any, digits: Any, scale: Any, unit: Any, r: int, sharing: int) -> None:
    i32 = ir.IntegerType.get_signless(32)
    # Adding 128 to the three lower digits makes each byte of the sum a digit, the lower ones + 128.
    whole = [
        arith.addi(
            _asm(i32, [arith.mulf(value, scale)], "cvt.rni.s32.f32 $0, $1;", "=r,f"),
            _i32(0x00808080),
        )
        for value in _load_four(x, unit)
    ]
    # The 4 x 4 transpose of their bytes.
    a, b, c, d = whole
    low, high = ([_prmt(a, b, n), _prmt(c, d, n)] for n in (0x5140, 0x7362))
    words = [_prmt(x, y, n) for x, y in (low, high) for n in (0x5410, 0x7632)]
    words = [*(arith.xori(word, _i32(0x80808080)) for word in words[:3]), words[3]]
    i, h, c = (_mask(arith.shrui(unit, _i32(n)), m) for n, m in ((0, 3), (2, 1), (3, 1)))
    step = arith.shli(arith.shrui(unit, _i32(4)), _i32(7))
    base = arith.addi(step, arith.shli(i, _i32(2)))
    pointer = utils.memref_ptr(digits)
    if sharing == 1:
        base = arith.addi(base, arith.addi(arith.shli(c, _i32(6)), arith.shli(h, _i32(1))))
        upper = arith.cmpi(arith.CmpIPredicate.ne, c, _i32(0))
        for d, word in enumerate(words):
            both = llvm.mlir_undef(ir.VectorType.get((2,), i32))
            for n, value in enumerate(
                (arith.select(upper, _i32(0), word), arith.select(upper, word, _i32(0)))
            ):
                both = llvm.insertelement(both, value, _i32(n))
            at = utils.getelementptr(pointer, [arith.addi(base, _i32(16 * d))], i32)
            llvm.store(both, at, alignment=8)
    else:
        base = arith.addi(base, arith.addi(arith.shli(c, _i32(1)), h))
        for d, word in enumerate(words):
            at = arith.addi(base, _i32(64 * (r % 2) + 16 * d))
            llvm.store(word, utils.getelementptr(pointer, [at], i32))


def _load_four(x: Any, unit: Any) -> list[Any]:
    """Columns 4·unit..4·unit + 3 of one row's slice."""
    f32 = ir.F32Type.get()
    at = utils.getelementptr(utils.memref_ptr(x), [arith.shli(unit, _i32(2))], f32)
    four = llvm.load(ir.VectorType.get((4,), f32), at, alignment=16)
    return [llvm.extractelement(four, _i32(i)) for i in range(4)]


def _units(x: Any) -> tuple[int, list[Any]]:
    """How many runs of 4 columns a slice has, and those of this thread; the last may be beyond."""
    count = ir.MemRefType(x.type).shape[0] // 4
    thread = _mask(utils.thread_idx(), THREADS - 1)
    return count, [arith.addi(thread, _i32(i)) for i in range(0, count, THREADS)]


def _i32(value: int) -> Any:
    return utils.c(value - (1 << 32) if value >> 31 else value, ir.IntegerType.get_signless(32))


def _mask(x: Any, bits: int) -> Any:
    return arith.andi(x, _i32(bits))


def _asm(type_: Any, operands: Sequence[Any], text: str, constraints: str) -> Any:
    return llvm.inline_asm(type_, operands, text, constraints, has_side_effects=False)
