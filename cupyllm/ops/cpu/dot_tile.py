"""The tile that every product is made of: some rows of weights by some rows of activations, in registers.

    y[c, r] = sum over k of w[r, k] * x[c, k]        r < ROWS (1 or 4), c < COLUMNS (1, 2 or 4)

Both operands lie with k side by side, as the checkpoint stores weights and the step makes activations, so nothing is
transposed. A step of the loop takes 2 * lanes numbers of every row: with 4 by 4 rows it reads 8 rows and does 16
rows' work, which is what lets arithmetic keep up with memory.

The order of a sum depends on `lanes` only: each lane adds its numbers in order of k, and a tree adds the lanes. So an
output is the same, to the last bit, whichever tile it was computed in.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from cupyllm.ops.cpu.compile import instruction
from cupyllm.ops.cpu.vectors import (
    BF16,
    I64,
    Builder,
    Value,
    bf16_dot,
    data_pointer,
    even_of_pairs,
    load_pairs,
    load_widened,
    multiply_add,
    number,
    odd_of_pairs,
    store,
    sums_of_four,
    vector_type,
)


def _dot_tile(
    typing_context: Any,
    y: Any, y_offset: Any, y_stride: Any,
    w: Any, w_offset: Any, w_stride: Any,
    x: Any, x_offset: Any, x_stride: Any,
    length: Any, ROWS: Any, COLUMNS: Any, LANES: Any,
) -> Any:  # fmt: skip
    """Compute a tile of y (float32). Offsets and strides between rows are in elements of the arrays' memory; `length`
    is a multiple of 2 * LANES.

    w is float32, FP16 or BF16; x is float32 in the order that `pack` gives it (linear.py), or, with 16 lanes and w in
    BF16, BF16 too.
    """
    arguments = (y, y_offset, y_stride, w, w_offset, w_stride, x, x_offset, x_stride, length, ROWS, COLUMNS, LANES)
    rows, columns, lanes = (literal.literal_value for literal in (ROWS, COLUMNS, LANES))

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        numbers = [
            None if isinstance(kind, types.Array) else context.cast(builder, value, kind, types.int64)
            for kind, value in zip(signature.args, values, strict=True)
        ]
        y_pointer = data_pointer(context, builder, y, values[0], numbers[1])
        w_pointer = data_pointer(context, builder, w, values[3], numbers[4])
        x_pointer = data_pointer(context, builder, x, values[6], numbers[7])
        w_rows = [builder.gep(w_pointer, [builder.mul(numbers[5], number(row))]) for row in range(rows)]
        x_rows = [builder.gep(x_pointer, [builder.mul(numbers[8], number(column))]) for column in range(columns)]
        step = _Step(builder, w.dtype, x.dtype, lanes, w_rows, x_rows)
        totals = _loop(builder, step, rows * columns, numbers[9])
        for column in range(columns):
            mine = totals[column * rows : (column + 1) * rows]
            sums = sums_of_four(builder, mine if rows == 4 else mine * 4)
            if rows == 1:
                sums = builder.extract_element(sums, ir.Constant(ir.IntType(32), 0))
            store(builder, sums, y_pointer, builder.mul(numbers[2], number(column)))
        return context.get_dummy_value()

    return types.void(*arguments), generate


dot_tile = instruction(_dot_tile)


def _loop(builder: Builder, step: _Step, count: int, length: Value) -> list[Value]:
    """for k in range(0, length, 2 * lanes): totals = step(k, totals), with the `count` totals in registers."""
    before = builder.block
    body, after = builder.append_basic_block("tile_step"), builder.append_basic_block("tile_end")
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(I64)
    k.add_incoming(number(0), before)
    totals = [builder.phi(vector_type(step.lanes)) for _ in range(count)]
    new_totals = step.emit(k, totals)
    next_k = builder.add(k, number(2 * step.lanes))
    k.add_incoming(next_k, body)
    for total, new_total in zip(totals, new_totals, strict=True):
        total.add_incoming(ir.Constant(total.type, None), before)  # zeros
        total.add_incoming(new_total, body)
    builder.cbranch(builder.icmp_signed("<", next_k, length), body, after)
    builder.position_at_end(after)
    return new_totals


class _Step:
    """One step of the loop, by the types of the operands. totals[column * rows + row] is that pair's vector."""

    def __init__(
        self, builder: Builder, w_type: Any, x_type: Any, lanes: int, w_rows: list[Value], x_rows: list[Value]
    ) -> None:
        self.builder, self.lanes, self.w_rows, self.x_rows = builder, lanes, w_rows, x_rows
        self.w_type, self.x_type = w_type, x_type
        assert x_type == types.float32 or (w_type == x_type == BF16 and lanes == 16)

    def emit(self, k: Value, totals: list[Value]) -> list[Value]:
        if self.w_type != BF16:
            return self._plain(k, totals)
        pairs = [load_pairs(self.builder, row, k, self.lanes) for row in self.w_rows]
        if self.x_type == BF16:
            return self._bf16(k, pairs, totals)
        even = [even_of_pairs(self.builder, pair) for pair in pairs]
        totals = self._multiply_add(even, k, totals)
        odd = [odd_of_pairs(self.builder, pair) for pair in pairs]
        return self._multiply_add(odd, self.builder.add(k, number(self.lanes)), totals)

    def _plain(self, k: Value, totals: list[Value]) -> list[Value]:
        """float32 and FP16: two vectors, in order of k."""
        for place in (k, self.builder.add(k, number(self.lanes))):
            ws = [load_widened(self.builder, self.w_type, row, place, self.lanes) for row in self.w_rows]
            totals = self._multiply_add(ws, place, totals)
        return totals

    def _multiply_add(self, ws: list[Value], place: Value, totals: list[Value]) -> list[Value]:
        """Add the products of one vector of every row of w and of x (at `place`)."""
        xs = [load_widened(self.builder, types.float32, row, place, self.lanes) for row in self.x_rows]
        pairs = [(w, x) for x in xs for w in ws]
        return [multiply_add(self.builder, w, x, total) for (w, x), total in zip(pairs, totals, strict=True)]

    def _bf16(self, k: Value, pairs: list[Value], totals: list[Value]) -> list[Value]:
        xs = [load_pairs(self.builder, row, k, self.lanes) for row in self.x_rows]
        operands = [(w, x) for x in xs for w in pairs]
        return [bf16_dot(self.builder, total, w, x) for (w, x), total in zip(operands, totals, strict=True)]
