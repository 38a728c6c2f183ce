"""Activations as the tiles read them: normed, rounded to the type of the products, in the order of the weights.

    _pack_floats   float32 or bf16
    _pack_int8     a byte each, with a scale for every 64 (int8.py)

Both take a row's numbers as vectors, several at once, so that packing costs little beside the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cupyllm.ops.cpu.compile import instruction, part, part_by_type
from cupyllm.ops.cpu.dot_tile import BUNDLE, BUNDLE_BYTES, GROUP, LANES_INT8
from cupyllm.ops.cpu.products import chunks_of
from cupyllm.ops.cpu.rms import inverse_root_mean_square
from cupyllm.ops.cpu.team import share_out
from cupyllm.ops.cpu.vectors import (
    BF16,
    F32,
    I32,
    INT8,
    LINE,
    Builder,
    Value,
    call_on_vector,
    data_pointer,
    int8_dot,
    load,
    number,
    round_to_bf16,
    shuffle,
    splat,
    store,
    vector_type,
)

_TOKENS = 4  # in a chunk


@part
def packed_rows(team: Any, x: Any, norm: Any, eps: float, like: Any, PAIRS: int, LANES: int) -> Any:
    """norm(x) packed, in the type of `like`; an empty norm leaves x as it is."""
    T, K = x.shape
    packed = empty_rows(T, chunks_of(K, BUNDLE) * BUNDLE_BYTES if like.itemsize == 1 else K, like)
    share_out(team, pack_chunk, chunks_of(T, _TOKENS), (_TOKENS, packed, x, norm, eps), (PAIRS, LANES))
    return packed


@part
def empty_rows(count: int, width: int, like: Any) -> Any:
    """Memory for `count` rows, of `like`'s type, that begins at a cache line: a vector in two lines is read slower."""
    memory = np.empty(count * width + LINE // like.itemsize, like.dtype)
    first = -memory.ctypes.data % LINE // like.itemsize
    return memory[first : first + count * width].reshape(count, width)


def _pack_floats(chunk: int, size: int, packed: Any, x: Any, norm: Any, eps: float, PAIRS: int, LANES: int) -> None:
    """packed[t] = norm(x[t]), as float32 or bf16, for `size` tokens.

    PAIRS: of 2 * LANES numbers the even ones come first, then the odd ones, as dot_tile widens bf16 weights.
    """
    K, normed = x.shape[1], len(norm) > 0
    for t in range(chunk * size, min((chunk + 1) * size, len(x))):
        scale = inverse_root_mean_square(x, t * K, K, eps, LANES) if normed else np.float32(1)
        for k in range(0, K, 2 * LANES):
            if normed:
                pack_two_vectors(packed, t * K + k, x, t * K + k, scale, norm, k, PAIRS, LANES, 1)
            else:
                pack_two_vectors(packed, t * K + k, x, t * K + k, scale, norm, 0, PAIRS, LANES, 0)


def _pack_int8(chunk: int, size: int, packed: Any, x: Any, norm: Any, eps: float, PAIRS: int, LANES: int) -> None:
    """packed[t] = norm(x[t]) in int8, for `size` tokens.

    The numbers lie in bundles as those of weights do (int8.py), but a last bundle has room for 16 groups, and zeros in
    it. What else is known of the groups lies behind them (dot_tile.py).
    """
    K, width, normed = x.shape[1], packed.shape[1], len(norm) > 0
    for t in range(chunk * size, min((chunk + 1) * size, len(x))):
        scale = inverse_root_mean_square(x, t * K, K, eps, LANES) if normed else np.float32(1)
        if K % BUNDLE:
            packed[t, width - BUNDLE_BYTES :] = 0
        for k in range(0, K, GROUP):
            bundle, group = t * width + k // BUNDLE * BUNDLE_BYTES, k % BUNDLE // GROUP * 4
            if normed:
                pack_group(packed, bundle + group, x, t * K + k, scale, norm, k, LANES, 1)
            else:
                pack_group(packed, bundle + group, x, t * K + k, scale, norm, 0, LANES, 0)


@part_by_type(lambda chunk, size, packed, *others: _pack_int8 if packed.dtype == INT8 else _pack_floats)
def pack_chunk(chunk: int, size: int, packed: Any, x: Any, norm: Any, eps: float, PAIRS: int, LANES: int) -> None:
    """_pack_int8 or _pack_floats, by the type of `packed`."""


def _pack_two_vectors(
    typing_context: Any, packed: Any, packed_offset: Any, x: Any, x_offset: Any, scale: Any,
    norm: Any, norm_offset: Any, PAIRS: Any, LANES: Any, NORMED: Any,
) -> Any:  # fmt: skip
    """Pack 2 * LANES numbers of x: times scale, then times norm where NORMED."""
    arguments = (packed, packed_offset, x, x_offset, scale, norm, norm_offset, PAIRS, LANES, NORMED)
    pairs, lanes, normed = PAIRS.literal_value, LANES.literal_value, NORMED.literal_value

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        first, second = _scaled(context, builder, signature, values, lanes, normed, count=2)
        if pairs:
            even = [2 * lane for lane in range(lanes)]
            odd = [lane + 1 for lane in even]
            first, second = shuffle(builder, first, second, even), shuffle(builder, first, second, odd)
        if packed.dtype == BF16:
            first, second = round_to_bf16(builder, first), round_to_bf16(builder, second)
        pointer = data_pointer(context, builder, packed, values[0], values[1])
        store(builder, first, pointer, number(0))
        store(builder, second, pointer, number(lanes))
        return context.get_dummy_value()

    return types.void(*arguments), generate


def _pack_group(
    typing_context: Any, packed: Any, packed_offset: Any, x: Any, x_offset: Any, scale: Any,
    norm: Any, norm_offset: Any, LANES: Any, NORMED: Any,
) -> Any:  # fmt: skip
    """Quantise a group into its lane of a bundle: the largest magnitude is 127, NaN the scale if not finite."""
    arguments = (packed, packed_offset, x, x_offset, scale, norm, norm_offset, LANES, NORMED)
    lanes, normed = LANES.literal_value, NORMED.literal_value

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        vectors = _scaled(context, builder, signature, values, lanes, normed, count=GROUP // lanes)
        zero, largest_byte = ir.Constant(F32, 0.0), ir.Constant(F32, 127.0)
        magnitudes = [call_on_vector(builder, "fabs", vector) for vector in vectors]
        largest = _over_lanes(builder, _larger, magnitudes)
        zeros = ir.Constant(vector_type(lanes), None)
        spoiled = _over_lanes(builder, _sum, [builder.fmul(vector, zeros) for vector in vectors])  # 0, or NaN
        is_zero = builder.fcmp_ordered("<=", largest, zero)
        inverse = splat(builder, builder.select(is_zero, zero, builder.fdiv(largest_byte, largest)), lanes)
        rounded = [call_on_vector(builder, "rint", builder.fmul(vector, inverse)) for vector in vectors]
        whole = [builder.fptosi(vector, ir.VectorType(I32, lanes)) for vector in rounded]
        numbers = [builder.trunc(vector, ir.VectorType(ir.IntType(8), lanes)) for vector in whole]
        while len(numbers) > 1:
            both = list(range(2 * numbers[0].type.count))
            numbers = [shuffle(builder, a, b, both) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        fours = builder.bitcast(numbers[0], ir.VectorType(I32, GROUP // 4))
        ones = ir.Constant(fours.type, [0x01010101] * fours.type.count)
        sums = int8_dot(builder, ir.Constant(fours.type, None), ones, fours)
        correction = builder.mul(_over_lanes(builder, _whole_sum, [sums]), ir.Constant(I32, -128))
        pointer = data_pointer(context, builder, packed, values[0], values[1])
        for four in range(GROUP // 4):
            lane = builder.extract_element(fours, ir.Constant(I32, four))
            store(builder, lane, pointer, number(four * 4 * LANES_INT8))
        store(builder, correction, pointer, number(BUNDLE))
        result = builder.fadd(builder.fdiv(largest, largest_byte), spoiled)
        store(builder, result, pointer, number(BUNDLE + 4 * LANES_INT8))
        return context.get_dummy_value()

    return types.void(*arguments), generate


pack_two_vectors = instruction(_pack_two_vectors)
pack_group = instruction(_pack_group)


def _scaled(
    context: Any, builder: Builder, signature: Any, values: Any, lanes: int, normed: int, count: int
) -> list[Value]:
    """`count` vectors of x, times scale and times norm."""
    x, norm = signature.args[2], signature.args[5]
    x_pointer = data_pointer(context, builder, x, values[2], values[3])
    norm_pointer = data_pointer(context, builder, norm, values[5], values[6])
    scale = splat(builder, context.cast(builder, values[4], signature.args[4], types.float32), lanes)
    vectors = []
    for place in range(0, count * lanes, lanes):
        vector = builder.fmul(load(builder, x_pointer, number(place), vector_type(lanes)), scale)
        if normed:
            vector = builder.fmul(vector, load(builder, norm_pointer, number(place), vector_type(lanes)))
        vectors.append(vector)
    return vectors


def _larger(builder: Builder, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _sum(builder: Builder, a: Value, b: Value) -> Value:
    return builder.fadd(a, b)


def _whole_sum(builder: Builder, a: Value, b: Value) -> Value:
    return builder.add(a, b)


def _over_lanes(builder: Builder, combine: Any, vectors: list[Value]) -> Value:
    """All lanes of all vectors, combined two by two."""
    total = vectors[0]
    for vector in vectors[1:]:
        total = combine(builder, vector, total)
    lanes = half = total.type.count
    while half > 1:
        half //= 2
        total = combine(builder, total, shuffle(builder, total, total, [lane ^ half for lane in range(lanes)]))
    return builder.extract_element(total, ir.Constant(I32, 0))
