"""Numbers from bits, bits from numbers, and what is built of them: exp in float64, log in float32.

Both have no branches, so that loops over them become vectors. They are as exact as sampling needs (sampling.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cupyllm.ops.cpu.compile import instruction, part
from cupyllm.ops.cpu.vectors import F32, I32, Builder, Value

_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10  # ln 2 in two parts
_BIAS, _MANTISSA_BITS = np.int64(1023), np.int64(52)
_LN2, _SQRT_2 = np.float32(0.6931471805599453), np.float32(1.4142135)
_ONE, _TWO, _HALF = np.float32(1), np.float32(2), np.float32(0.5)
_THIRD, _FIFTH, _SEVENTH, _NINTH = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7), np.float32(1 / 9)


def _bits_of(typing_context: Any, value: Any) -> Any:
    """The bits of a float32, as int32."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        return builder.bitcast(context.cast(builder, values[0], value, types.float32), I32)

    return types.int32(value), generate


def _float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 with these bits (int32)."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        return builder.bitcast(context.cast(builder, values[0], bits, types.int32), F32)

    return types.float32(bits), generate


def _double_of(typing_context: Any, bits: Any) -> Any:
    """The float64 with these bits (int64)."""

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        return builder.bitcast(context.cast(builder, values[0], bits, types.int64), ir.DoubleType())

    return types.float64(bits), generate


bits_of = instruction(_bits_of)
float_of = instruction(_float_of)
double_of = instruction(_double_of)


@part
def exp_double(x: Any) -> Any:
    """e ** x in float64 for x from -708 to 0, relative error below 1e-12.

    x = n * ln 2 + r, and e ** r by its Taylor series up to r ** 10; |r| is at most ln(2) / 2.
    """
    n = np.floor(x * _LOG2_E + 0.5)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    y = 1.0 + r * (1.0 / 10)
    for k in (9, 8, 7, 6, 5, 4, 3, 2, 1):
        y = 1.0 + y * r * (1.0 / k)
    return y * double_of((np.int64(n) + _BIAS) << _MANTISSA_BITS)


@part
def log(x: Any) -> Any:
    """The natural logarithm in float32 of a positive, normal number, relative error below 1e-6.

    x = 2 ** e * m with m around 1, and log m = 2 * artanh s for s = (m - 1) / (m + 1).
    """
    bits = bits_of(x)
    exponent = np.int32((bits >> np.int32(23)) - np.int32(127))
    m = float_of((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000))  # from 1 to 2
    large = m > _SQRT_2
    m = m * _HALF if large else m
    e = np.float32(exponent + np.int32(1) if large else exponent)
    s = (m - _ONE) / (m + _ONE)
    s2 = s * s
    return e * _LN2 + _TWO * s * (_ONE + s2 * (_THIRD + s2 * (_FIFTH + s2 * (_SEVENTH + s2 * _NINTH))))
