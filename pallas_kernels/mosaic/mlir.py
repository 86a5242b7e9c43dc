"""Short functions that emit MLIR in a kernel: what Pallas cannot express, and constants."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf


def inline(*types: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """plgpu.inline_mgpu for a function that takes no context and returns nothing."""

    def wrap(f: Callable[..., None]) -> Callable[..., None]:
        return plgpu.inline_mgpu(arg_types=types)(lambda context, *args: f(*args))

    return wrap


def sync(interpreted: bool) -> None:
    """Wait for the CTA's four warps; called from Pallas. The interpreter has no warps."""
    if interpreted:
        return

    @inline()
    def emit() -> None:
        utils.warpgroup_barrier()

    emit()


def either(condition: Any, then: Callable[[], list[Any]], otherwise: list[Any]) -> list[Any]:
    """What ``then`` gives where the condition holds, else the values of ``otherwise``."""
    branch = scf.IfOp(condition, [value.type for value in otherwise], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(then())
    with ir.InsertionPoint(branch.elseRegion.blocks[0]):
        scf.yield_(otherwise)
    return list(branch.results)


def pick(number: Any, values: Iterable[Any]) -> Any:
    """``values[number]``, the number an int32."""
    kept, *others = values
    for i, value in enumerate(others, start=1):
        kept = arith.select(arith.cmpi(arith.CmpIPredicate.eq, number, i32(i)), value, kept)
    return kept


def mma(acc: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    """``acc + a·b`` for a warp: int8 [16, 32] times [32, 8], int32 sums."""
    i32 = i32_type()
    out = asm(
        llvm.StructType.get_literal([i32] * 4),
        [*a, *b[:2], *acc],
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        ",".join(["=r"] * 4 + ["r"] * 10),
    )
    return [llvm.extractvalue(i32, out, [i]) for i in range(4)]


def halves(pair: Any) -> list[Any]:
    """The two float16 of a word, in float32."""
    out = asm(
        llvm.StructType.get_literal([f32()] * 2),
        [pair],
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
        " cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
        "=f,=f,r",
    )
    return [llvm.extractvalue(f32(), out, [i]) for i in range(2)]


def prmt(a: Any, b: Any, order: int) -> Any:
    """Four of the eight bytes of a and b: a nibble of ``order`` for each."""
    return asm(i32_type(), [a, b, i32(order)], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def elements(vector: Any) -> list[Any]:
    """The numbers of a vector."""
    size = ir.VectorType(vector.type).shape[0]
    return [llvm.extractelement(vector, i32(i)) for i in range(size)]


def store_four(base: Any, offset: int, words: Sequence[Any]) -> None:
    """Store four words at once, ``offset`` words after ``base``."""
    four = llvm.mlir_undef(vector(4))
    for i, word in enumerate(words):
        four = llvm.insertelement(four, word, i32(i))
    llvm.store(four, utils.getelementptr(base, [offset], i32_type()), alignment=16)


def pointer(ref: Any) -> Any:
    """The address of a reference, marked as global memory unless it is shared memory."""
    pointer = utils.memref_ptr(ref)
    if pointer.type == llvm.PointerType.get(3):
        return pointer
    return llvm.addrspacecast(llvm.PointerType.get(1), pointer)


def at(ref: Any, index: Any, type_: Any) -> Any:
    """The address of an element of a reference."""
    return utils.getelementptr(pointer(ref), [index], type_)


def offset(pointer: Any, words: Any) -> Any:
    """The address ``words`` words after another."""
    return utils.getelementptr(pointer, [words], i32_type())


def stride(ref: Any) -> int:
    """Elements from one index of a reference's first axis to the next."""
    return ir.MemRefType(ref.type).get_strides_and_offset()[0][0]


def less(a: Any, b: Any) -> Any:
    """``a < b`` for unsigned integers."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def i32_type() -> Any:
    return ir.IntegerType.get_signless(32)


def i64_type() -> Any:
    return ir.IntegerType.get_signless(64)


def f32() -> Any:
    return ir.F32Type.get()


def vector(size: int, type_: Any = None) -> Any:
    return ir.VectorType.get((size,), type_ or i32_type())


def i32(value: int) -> Any:
    return utils.c(value - (1 << 32) if value >> 31 == 1 else value, i32_type())


def i64(value: int) -> Any:
    return utils.c(value, i64_type())


def zero() -> Any:
    return utils.c(0.0, f32())


def mask(x: Any, bits: int) -> Any:
    return arith.andi(x, i32(bits))


def asm(type_: Any, operands: Sequence[Any], text: str, constraints: str) -> Any:
    """PTX that has a result and no effect."""
    return llvm.inline_asm(type_, operands, text, constraints, has_side_effects=False)


def hold() -> None:
    """Keep the compiler from moving loads up past this place, which would take registers."""
    effect("bar.warp.sync 0xffffffff;")


def effect(text: str, *operands: Any, constraints: str = "") -> None:
    """PTX that has an effect and no result."""
    constraints = ",".join(filter(None, [constraints, "~{memory}"]))
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)
