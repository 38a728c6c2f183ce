"""The tile that every product is made of: some rows of weights by some rows of activations, in registers.

    y[c, r] = sum over k of w[r, k] * x[c, k]        r < ROWS (1, 4 or 8), c < COLUMNS (1, 2 or 4)

Both operands lie with k side by side, as the checkpoint stores weights and the step makes activations, so nothing is
transposed. A step of the loop takes 2 * lanes numbers of every row: with 4 by 4 rows it reads 8 rows and does 16
rows' work, which is what lets arithmetic keep up with memory.

Weights that come from memory and not from a cache are asked for READ_AHEAD bytes before they are needed (FROM_MEMORY):
a thread that waits for one line after the other gets half of what the memory gives. With one column it also goes
through the rows one by one, so that it reads in one direction.

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
    F32,
    I32,
    I64,
    INT8,
    Builder,
    Value,
    bf16_dot,
    data_pointer,
    even_of_pairs,
    int8_dot,
    load,
    load_pairs,
    load_widened,
    multiply_add,
    number,
    odd_of_pairs,
    prefetch,
    splat,
    store,
    sums_of_four,
    vector_type,
)

# int8 (int8.py): so many numbers of a token share a scale, and take so many bytes with all that is known of them.
GROUP = 64
GROUP_BYTES = 3 * GROUP


READ_AHEAD = 1 << 14  # bytes; it fits many times into an L2 cache
_LINE = 64  # bytes of a cache line


def _dot_tile(
    typing_context: Any,
    y: Any, y_offset: Any, y_stride: Any,
    w: Any, w_offset: Any, w_stride: Any,
    x: Any, x_offset: Any, x_stride: Any,
    totals: Any, totals_offset: Any,
    k_start: Any, k_stop: Any, length: Any, ROWS: Any, COLUMNS: Any, LANES: Any, FROM_MEMORY: Any,
) -> Any:  # fmt: skip
    """Compute a tile of y (float32). Offsets and strides between rows are in elements of the arrays' memory.

    A long sum may be taken in pieces, so that what is read stays in a cache: this one goes from k_start to k_stop of
    `length`, all multiples of 2 * LANES. A piece that is not the last leaves its totals in the memory of `totals`
    (float32, ROWS * COLUMNS * LANES numbers from totals_offset), and one that is not the first begins with them.

    w is float32, FP16 or BF16; x is float32 in the order that `pack` gives it (linear.py), or, with 16 lanes and w in
    BF16, BF16 too. Or w is INT8 with the scales behind each row, and x as `pack_int8` makes it (int8.py).

    FROM_MEMORY: whether w comes from memory (1) or has been read before (0).
    """
    arguments = (
        y, y_offset, y_stride, w, w_offset, w_stride, x, x_offset, x_stride, totals, totals_offset, k_start, k_stop,
        length, ROWS, COLUMNS, LANES, FROM_MEMORY,
    )  # fmt: skip
    rows, columns, lanes, from_memory = (literal.literal_value for literal in (ROWS, COLUMNS, LANES, FROM_MEMORY))
    # A sum waits for the sum before it, so narrow vectors need several rows at once to keep up.
    rows_at_once = max(16 // lanes, 1) if from_memory and columns == 1 and rows > 1 else rows

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
        kept = data_pointer(context, builder, totals, values[9], numbers[10])
        places = [number(place * lanes) for place in range(rows * columns)]
        is_first = builder.icmp_signed("==", numbers[11], number(0))
        starts = _zeros_or_kept(builder, is_first, kept, places, lanes)
        sums: list[Value] = []
        for row in range(0, rows, rows_at_once):
            some = slice(row, row + rows_at_once)
            step = _Step(builder, w.dtype, x.dtype, lanes, w_rows[some], x_rows, numbers[13], bool(from_memory))
            sums += _loop(builder, step, starts[some] if columns == 1 else starts, numbers[11], numbers[12])
        is_last = builder.icmp_signed("==", numbers[12], numbers[13])
        with builder.if_else(is_last) as (then, otherwise):
            with then:
                for column in range(columns):
                    place = builder.gep(y_pointer, [builder.mul(numbers[2], number(column))])
                    mine = sums[column * rows : (column + 1) * rows]
                    for row in range(0, rows, 4):
                        four = sums_of_four(builder, mine[row : row + 4] if rows >= 4 else mine * 4)
                        result = four if rows >= 4 else builder.extract_element(four, ir.Constant(I32, 0))
                        store(builder, result, place, number(row))
            with otherwise:
                for place, total in zip(places, sums, strict=True):
                    store(builder, total, kept, place)
        return context.get_dummy_value()

    return types.void(*arguments), generate


dot_tile = instruction(_dot_tile)


def _zeros_or_kept(builder: Builder, is_first: Value, kept: Value, places: list[Value], lanes: int) -> list[Value]:
    """What the totals begin with."""
    before = builder.block
    with builder.if_then(builder.not_(is_first)):
        loaded = [load(builder, kept, place, vector_type(lanes)) for place in places]
        inside = builder.block
    starts = [builder.phi(vector_type(lanes)) for _ in places]
    for start, value in zip(starts, loaded, strict=True):
        start.add_incoming(ir.Constant(start.type, None), before)
        start.add_incoming(value, inside)
    return starts


def _loop(builder: Builder, step: _Step, starts: list[Value], k_start: Value, k_stop: Value) -> list[Value]:
    """for k in range(k_start, k_stop, step.width): totals = step(k, totals), with the totals in registers."""
    before = builder.block
    body, after = builder.append_basic_block("tile_step"), builder.append_basic_block("tile_end")
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(I64)
    k.add_incoming(k_start, before)
    totals = [builder.phi(start.type) for start in starts]
    new_totals = step.emit(k, totals)
    next_k = builder.add(k, number(step.width))
    k.add_incoming(next_k, body)
    for total, start, new_total in zip(totals, starts, new_totals, strict=True):
        total.add_incoming(start, before)
        total.add_incoming(new_total, body)
    builder.cbranch(builder.icmp_signed("<", next_k, k_stop), body, after)
    builder.position_at_end(after)
    return new_totals


class _Step:
    """One step of the loop, by the types of the operands. totals[column * rows + row] is that pair's vector."""

    def __init__(
        self,
        builder: Builder,
        w_type: Any,
        x_type: Any,
        lanes: int,
        w_rows: list[Value],
        x_rows: list[Value],
        length: Value,
        from_memory: bool,
    ) -> None:
        self.builder, self.lanes, self.w_rows, self.x_rows = builder, lanes, w_rows, x_rows
        self.w_type, self.x_type, self.length, self.from_memory = w_type, x_type, length, from_memory
        assert x_type == types.float32 or w_type == x_type == INT8 or (w_type == x_type == BF16 and lanes == 16)
        self.width = GROUP if w_type == INT8 else 2 * lanes  # numbers of every row that a step takes

    def emit(self, k: Value, totals: list[Value]) -> list[Value]:
        if self.from_memory:
            self._read_ahead(k)
        if self.w_type == INT8:
            return self._int8(k, totals)
        if self.w_type != BF16:
            return self._plain(k, totals)
        pairs = [load_pairs(self.builder, row, k, self.lanes) for row in self.w_rows]
        if self.x_type == BF16:
            return self._bf16(k, pairs, totals)
        even = [even_of_pairs(self.builder, pair) for pair in pairs]
        totals = self._multiply_add(even, k, totals)
        odd = [odd_of_pairs(self.builder, pair) for pair in pairs]
        return self._multiply_add(odd, self.builder.add(k, number(self.lanes)), totals)

    def _read_ahead(self, k: Value) -> None:
        """Ask for what the rows have READ_AHEAD bytes further on: the rows after them, or the next chunk's."""
        width = self.w_type.bitwidth // 8
        for place in range(0, self.width * width, _LINE):
            ahead = self.builder.add(k, number((READ_AHEAD + place) // width))
            for row in self.w_rows:
                prefetch(self.builder, self.builder.gep(row, [ahead]))

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

    def _int8(self, k: Value, totals: list[Value]) -> list[Value]:
        """One group: its whole-number sum for every pair of rows, times the group's scales in w and in x."""
        builder, lanes = self.builder, self.lanes
        whole = ir.VectorType(I32, lanes)
        x_group = builder.mul(k, number(GROUP_BYTES // GROUP))
        sums: list[Value] = [ir.Constant(whole, None)] * len(totals)
        for part in range(0, GROUP, 4 * lanes):  # bytes of a vector
            ws = [load(builder, row, builder.add(k, number(part)), whole) for row in self.w_rows]
            xs = [load(builder, row, builder.add(x_group, number(part)), whole) for row in self.x_rows]
            corrections = [load(builder, row, builder.add(x_group, number(GROUP + part)), whole) for row in self.x_rows]
            pairs = [(w, x, correction) for x, correction in zip(xs, corrections, strict=True) for w in ws]
            sums = [
                int8_dot(builder, correction if part == 0 else builder.add(total, correction), w, x)
                for (w, x, correction), total in zip(pairs, sums, strict=True)
            ]
        w_place = builder.add(self.length, builder.mul(builder.udiv(k, number(GROUP)), number(2)))
        x_place = builder.add(x_group, number(2 * GROUP))
        w_bits = [builder.zext(load(builder, row, w_place, ir.IntType(16)), I32) for row in self.w_rows]
        w_scales = [builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32) for bits in w_bits]
        x_scales = [load(builder, row, x_place, F32) for row in self.x_rows]
        scales = [splat(builder, builder.fmul(w, x), lanes) for x in x_scales for w in w_scales]
        floats = [builder.sitofp(total, vector_type(lanes)) for total in sums]
        return [multiply_add(builder, a, b, total) for a, b, total in zip(floats, scales, totals, strict=True)]
