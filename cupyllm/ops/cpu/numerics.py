"""Single numbers inside kernels: reading and writing stored types, exp and SiLU."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cupyllm.ops.cpu.compile import instruction, part
from cupyllm.ops.cpu.vectors import (
    BF16,
    F32,
    FP16,
    I32,
    LINE,
    Builder,
    Value,
    data_pointer,
    number,
    prefetch,
    round_to_bf16,
    store,
)

# Cody and Waite: ln 2 in two parts, so that x - n * ln 2 keeps all bits. The polynomial is that of Cephes' expf.
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P5, _P4, _P3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P2, _P1, _P0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ZERO, _HALF, _ONE, _INFINITY = np.float32(0), np.float32(0.5), np.float32(1), np.float32(np.inf)
_EXP_LOWEST, _EXP_HIGHEST = np.float32(-87.0), np.float32(88.0)


def _load_number(typing_context: Any, array: Any, offset: Any) -> Any:
    """Element `offset` of an array's memory as float32: stored as float32, FP16 or BF16 (vectors.py)."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        offset_value = context.cast(builder, values[1], offset, types.int64)
        stored = builder.load(data_pointer(context, builder, array, values[0], offset_value))
        if array.dtype == types.float32:
            return stored
        if array.dtype == FP16:
            return builder.fpext(builder.bitcast(stored, ir.HalfType()), F32)
        return builder.bitcast(builder.shl(builder.zext(stored, I32), ir.Constant(I32, 16)), F32)

    return types.float32(array, offset), generate


def _store_number(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write a float32 as the array's type, rounding to nearest even."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        offset_value = context.cast(builder, values[1], offset, types.int64)
        pointer = data_pointer(context, builder, array, values[0], offset_value)
        stored = context.cast(builder, values[2], value, types.float32)
        if array.dtype == FP16:
            stored = builder.fptrunc(stored, ir.HalfType())
        elif array.dtype == BF16:
            stored = round_to_bf16(builder, stored)
        store(builder, stored, pointer, ir.Constant(ir.IntType(64), 0))
        return context.get_dummy_value()

    return types.void(array, offset, value), generate


def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2 ** exponent as float32, for whole numbers from -126 to 127."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        biased = builder.add(context.cast(builder, values[0], exponent, types.int32), ir.Constant(I32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(I32, 23)), F32)

    return types.float32(exponent), generate


def _ask_for(typing_context: Any, array: Any, offset: Any, COUNT: Any) -> Any:
    """Have COUNT numbers of an array's memory, from `offset` on, brought into the L2 cache."""
    count = COUNT.literal_value

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        pointer = data_pointer(
            context, builder, array, values[0], context.cast(builder, values[1], offset, types.int64)
        )
        for place in range(0, count, LINE * 8 // array.dtype.bitwidth):
            prefetch(builder, builder.gep(pointer, [number(place)]))
        return context.get_dummy_value()

    return types.void(array, offset, COUNT), generate


def _fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once where the machine has an instruction for it."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        return builder.call(
            cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32] * 3), "llvm.fmuladd.f32"),
            [context.cast(builder, value, kind, types.float32) for value, kind in zip(values, (a, b, c), strict=True)],
        )

    return types.float32(a, b, c), generate


ask_for = instruction(_ask_for)
fused = instruction(_fused)
load_number = instruction(_load_number)
store_number = instruction(_store_number)
_as_power_of_two = instruction(_power_of_two)


@part
def exp(x: Any) -> Any:
    """e ** x in float32, within 2 units of the last place; 0 below -87 and inf above 88. It has no branches, so that
    loops over it become vectors.
    """
    inside = min(max(x, _EXP_LOWEST), _EXP_HIGHEST)
    n = np.floor(fused(inside, _LOG2_E, _HALF))
    r = fused(n, -_LN2_LOW, fused(n, -_LN2_HIGH, inside))
    p = fused(fused(fused(fused(fused(_P5, r, _P4), r, _P3), r, _P2), r, _P1), r, _P0)
    y = fused(p, r * r, r + _ONE) * _as_power_of_two(np.int32(n))
    y = _ZERO if x < _EXP_LOWEST else y
    return _INFINITY if x > _EXP_HIGHEST else y


@part
def silu(z: Any) -> Any:
    """z / (1 + exp(-z))"""
    return z / (_ONE + exp(-z))
