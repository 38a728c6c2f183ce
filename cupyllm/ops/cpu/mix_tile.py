"""The tile of the second half of attention: rows of weights times rows of values, summed, in registers.

    out[r, d] += sum over j of p[r, j] * v[j, d]        r < ROWS (4), d < VECTORS * lanes

Each output adds its products in order of j, one after another, whichever tile it was computed in.
"""

from __future__ import annotations

from typing import Any

from numba import types

from cupyllm.ops.cpu.compile import instruction
from cupyllm.ops.cpu.vectors import (
    F32,
    I64,
    Builder,
    Value,
    at_most,
    data_pointer,
    load,
    load_widened,
    multiply_add,
    number,
    splat,
    store,
    vector_type,
)


def _mix_tile(
    typing_context: Any,
    out: Any, out_offset: Any, out_stride: Any,
    p: Any, p_offset: Any, p_stride: Any, last: Any,
    v: Any, v_offset: Any, v_stride: Any,
    count: Any, ROWS: Any, VECTORS: Any, LANES: Any,
) -> Any:  # fmt: skip
    """Add to a tile of out (float32). Offsets and strides between rows are in elements; `count` >= 1 values are mixed.

    Rows after `last` are computed as that one again. p is float32; v is float32, FP16 or BF16.
    """
    arguments = (
        out, out_offset, out_stride, p, p_offset, p_stride, last, v, v_offset, v_stride, count, ROWS, VECTORS, LANES,
    )  # fmt: skip
    rows, vectors, lanes = (literal.literal_value for literal in (ROWS, VECTORS, LANES))

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        numbers = [
            None if isinstance(kind, types.Array) else context.cast(builder, value, kind, types.int64)
            for kind, value in zip(signature.args, values, strict=True)
        ]
        out_pointer = data_pointer(context, builder, out, values[0], numbers[1])
        p_pointer = data_pointer(context, builder, p, values[3], numbers[4])
        v_pointer = data_pointer(context, builder, v, values[7], numbers[8])
        row_numbers = [at_most(builder, number(row), numbers[6]) for row in range(rows)]
        places = [
            builder.add(builder.mul(numbers[2], row), number(lanes * vector))
            for row in row_numbers
            for vector in range(vectors)
        ]
        before, body = builder.block, builder.append_basic_block("mix_step")
        after = builder.append_basic_block("mix_end")
        starts = [load(builder, out_pointer, place, vector_type(lanes)) for place in places]
        builder.branch(body)
        builder.position_at_end(body)
        j = builder.phi(I64)
        j.add_incoming(number(0), before)
        totals = [builder.phi(vector_type(lanes)) for _ in places]
        v_row = builder.mul(j, numbers[9])
        vs = [
            load_widened(builder, v.dtype, v_pointer, builder.add(v_row, number(lanes * vector)), lanes)
            for vector in range(vectors)
        ]
        new_totals = []
        for row, row_number in enumerate(row_numbers):
            place = builder.add(builder.mul(numbers[5], row_number), j)
            weight = splat(builder, load(builder, p_pointer, place, F32), lanes)
            mine = totals[row * vectors : (row + 1) * vectors]
            new_totals += [multiply_add(builder, weight, value, total) for value, total in zip(vs, mine, strict=True)]
        next_j = builder.add(j, number(1))
        j.add_incoming(next_j, body)
        for total, start, new_total in zip(totals, starts, new_totals, strict=True):
            total.add_incoming(start, before)
            total.add_incoming(new_total, body)
        builder.cbranch(builder.icmp_signed("<", next_j, numbers[10]), body, after)
        builder.position_at_end(after)
        for place, new_total in zip(places, new_totals, strict=True):
            store(builder, new_total, out_pointer, place)
        return context.get_dummy_value()

    return types.void(*arguments), generate


mix_tile = instruction(_mix_tile)
