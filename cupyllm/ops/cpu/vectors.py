"""The vector instructions that the tiles are written with, as LLVM IR: load and widen, fused multiply-add, sums.

A vector is `<lanes x float>`. LLVM turns it into what the machine has: one AVX-512 register for 16 lanes, two AVX
registers where there are only those, four of SSE or NEON.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

Builder = Any  # llvmlite.ir.IRBuilder: the place where the next instruction goes
Value = Any  # llvmlite.ir.Value: a pointer, a number or a vector

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
# The types of numba's arrays that hold weights and cache, beside float32. numba has no float16 on the CPU.
FP16, BF16 = types.int16, types.uint16  # the bits
INT8 = types.uint8  # a whole number from -127 to 127, plus 128
_STORED = {types.float32: F32, FP16: ir.HalfType(), BF16: ir.IntType(16)}
LINE = 64  # bytes of a cache line
_HAS_VNNI = bool(llvm.get_host_cpu_features().get("avx512vnni"))


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no class for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def number(value: int) -> Value:
    return ir.Constant(I64, value)


def vector_type(lanes: int) -> Any:
    return ir.VectorType(F32, lanes)


def data_pointer(context: Any, builder: Builder, array_type: Any, array: Value, offset: Value) -> Value:
    """The address of element `offset` of an array's memory."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def load(builder: Builder, pointer: Value, offset: Value, type_: Any) -> Value:
    """Read `type_` at `offset` elements after `pointer`; any alignment."""
    place = builder.gep(pointer, [offset])
    return builder.load(builder.bitcast(place, type_.as_pointer()), align=1)


def store(builder: Builder, value: Value, pointer: Value, offset: Value) -> None:
    place = builder.gep(pointer, [offset])
    builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=1)


def prefetch(builder: Builder, pointer: Value) -> None:
    """Have the line at `pointer` brought into the L2 cache. Any address will do: this never faults."""
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    read, keep_in_l2, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    builder.call(function, [pointer, read, keep_in_l2, data])


def at_most(builder: Builder, value: Value, limit: Value) -> Value:
    """The smaller of two whole numbers."""
    return builder.select(builder.icmp_signed("<", value, limit), value, limit)


def load_pairs(builder: Builder, pointer: Value, offset: Value, lanes: int) -> Value:
    """2 * lanes bf16 numbers as `lanes` whole numbers of 32 bits: the even ones are the lower halves."""
    return load(builder, pointer, offset, ir.VectorType(I32, lanes))


def even_of_pairs(builder: Builder, pairs: Value) -> Value:
    """The even bf16 numbers as float32: a bf16 is the upper half of a float32."""
    lanes = pairs.type.count
    shifted = builder.shl(pairs, ir.Constant(pairs.type, [16] * lanes))
    return builder.bitcast(shifted, vector_type(lanes))


def odd_of_pairs(builder: Builder, pairs: Value) -> Value:
    """The odd bf16 numbers as float32."""
    lanes = pairs.type.count
    masked = builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * lanes))
    return builder.bitcast(masked, vector_type(lanes))


def load_widened(builder: Builder, element: Any, pointer: Value, offset: Value, lanes: int) -> Value:
    """`lanes` numbers of an array of type `element` (float32, FP16 or BF16), as float32."""
    stored = load(builder, pointer, offset, ir.VectorType(_STORED[element], lanes))
    if element == types.float32:
        return stored
    if element == FP16:
        return builder.fpext(stored, vector_type(lanes))
    return widened_from_bf16(builder, stored)


def widened_from_bf16(builder: Builder, bits: Value) -> Value:
    """A vector of bf16 numbers, as whole numbers of 16 bits, as float32."""
    lanes = bits.type.count
    wide = builder.zext(bits, ir.VectorType(I32, lanes))
    return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * lanes)), vector_type(lanes))


def first_lanes(builder: Builder, vector: Value, count: Value) -> Value:
    """The first `count` lanes, and zeros in the others."""
    lanes = vector.type.count
    numbers = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    limit = builder.bitcast(splat(builder, builder.bitcast(builder.trunc(count, I32), F32), lanes), numbers.type)
    return builder.select(builder.icmp_signed("<", numbers, limit), vector, ir.Constant(vector.type, None))


def splat(builder: Builder, scalar: Value, lanes: int) -> Value:
    """The same number in every lane."""
    first = builder.insert_element(ir.Constant(vector_type(lanes), ir.Undefined), scalar, ir.Constant(I32, 0))
    return shuffle(builder, first, first, [0] * lanes)


def multiply_add(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once where the machine has an instruction for it."""
    return _call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, [a, b, c])


def bf16_dot(builder: Builder, total: Value, a: Value, b: Value) -> Value:
    """VDPBF16PS: add to each of 16 lanes the two products of its pairs of bf16 numbers."""
    pairs = ir.VectorType(_BFloat(), 32)
    arguments = [total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)]
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, arguments)


def int8_dot(builder: Builder, total: Value, w: Value, x: Value) -> Value:
    """Add to each lane (32 bits) the four products of its bytes, w's without and x's with a sign: VPDPBUSD, or more
    instructions to the same effect.
    """
    if _HAS_VNNI and total.type.count == 16:
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, [total, w, x])

    def constant(value: int) -> Value:
        return ir.Constant(total.type, [value] * total.type.count)

    for byte in range(4):
        unsigned = builder.and_(builder.lshr(w, constant(8 * byte)), constant(0xFF))
        signed = builder.ashr(builder.shl(x, constant(24 - 8 * byte)), constant(24))
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


def round_to_bf16(builder: Builder, value: Value) -> Value:
    """The upper 16 bits of a float32 or of a vector of them, rounded to nearest even; a NaN stays one."""
    whole, half_as_wide = I32, ir.IntType(16)
    if isinstance(value.type, ir.VectorType):
        whole, half_as_wide = ir.VectorType(I32, value.type.count), ir.VectorType(half_as_wide, value.type.count)

    def constant(number: int) -> Value:
        return ir.Constant(whole, [number] * whole.count if isinstance(whole, ir.VectorType) else number)

    bits = builder.bitcast(value, whole)
    upper = builder.lshr(bits, constant(16))
    half = builder.add(constant(0x7FFF), builder.and_(upper, constant(1)))
    rounded = builder.lshr(builder.add(bits, half), constant(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, builder.or_(upper, constant(0x40)), rounded), half_as_wide)


def call_on_vector(builder: Builder, name: str, vector: Value) -> Value:
    """LLVM's function of that name of every lane."""
    return _call(builder, f"llvm.{name}.v{vector.type.count}f32", vector.type, [vector])


def shuffle(builder: Builder, a: Value, b: Value, lanes: list[int]) -> Value:
    """A vector of the named lanes of a, then b."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def sums_of_four(builder: Builder, vectors: list[Value]) -> Value:
    """The sums over the lanes of 4 vectors, as one vector of 4.

    A tree: the upper half of the lanes is added to the lower, then again, until one is left. The first two levels put
    two vectors beside each other, so that all four cost hardly more than one; each is summed in the same order.
    """
    lanes = vectors[0].type.count
    width = lanes  # lanes that one sum still has
    for _ in range(2):
        half = width // 2
        lower = [lane for lane in range(2 * lanes) if lane % width < half]
        upper = [lane + half for lane in lower]
        vectors = [
            builder.fadd(shuffle(builder, a, b, lower), shuffle(builder, a, b, upper))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width = half
    (total,) = vectors
    while width > 1:
        half = width // 2
        total = builder.fadd(total, shuffle(builder, total, total, [lane ^ half for lane in range(lanes)]))
        width = half
    return shuffle(builder, total, total, [lanes // 4 * place for place in range(4)])


def _call(builder: Builder, name: str, result: Any, arguments: list[Value]) -> Value:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)
