"""The tile that every product is made of: some rows of weights by some rows of activations, in registers.

    y[c, r] = sum over k of w[r, k] * x[c, k]        r < ROWS (1, 4 or 8), c < COLUMNS (1, 4 or 8)

Both operands lie with k side by side, as the checkpoint stores weights and the step makes activations, so nothing is
transposed. A step of the loop takes 2 * lanes numbers of every row. With 4 by 4 rows it reads 8 rows and does 16 rows'
work, which is what lets arithmetic keep up with the caches. One row by 8 reads weights in one direction only, as memory
gives them fastest, and so does 8 by 1, which goes through its rows one by one.

Weights that come from memory and not from a cache are asked for well before they are needed (ASKS): a thread that waits
for one line after the other gets half of what the memory gives.

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
    I32,
    I64,
    INT8,
    LINE,
    Builder,
    Value,
    at_most,
    bf16_dot,
    data_pointer,
    even_of_pairs,
    first_lanes,
    int8_dot,
    load,
    load_pairs,
    load_widened,
    multiply_add,
    number,
    odd_of_pairs,
    prefetch,
    store,
    sums_of_four,
    vector_type,
    widened_from_bf16,
)

# int8 (int8.py): so many numbers share a scale, so many lie in a bundle, and a token's bundle takes so many bytes: its
# numbers, then for each of 16 groups -128 times their sum (int32), and the scale (float32).
LANES_INT8 = 16
GROUP = 64
BUNDLE = LANES_INT8 * GROUP
BUNDLE_BYTES = BUNDLE + 2 * 4 * LANES_INT8


def _dot_tile(
    typing_context: Any,
    y: Any, y_offset: Any, y_stride: Any,
    w: Any, w_offset: Any, w_stride: Any,
    x: Any, x_offset: Any, x_stride: Any, last: Any,
    totals: Any, totals_offset: Any,
    k_start: Any, k_stop: Any, length: Any, ahead: Any, ROWS: Any, COLUMNS: Any, LANES: Any, ASKS: Any,
) -> Any:  # fmt: skip
    """Compute a tile of y (float32). Offsets and strides between rows are in elements of the arrays' memory.

    A long sum may be taken in pieces, so that what is read stays in a cache: this one goes from k_start to k_stop of
    `length`, all multiples of 2 * LANES. A piece that is not the last leaves its totals in the memory of `totals`
    (float32, ROWS * COLUMNS * LANES numbers from totals_offset), and one that is not the first begins with them.

    w is float32, FP16 or BF16; x is float32 as `_pack_floats` orders it (pack.py), or, with 16 lanes and w in BF16,
    BF16 too. Or w is INT8 with the scales behind each row, and x as `_pack_int8` makes it.

    Columns after `last` are computed as that one again. ASKS: whether to ask for the weights at the offset `ahead` and
    after it, as many as this tile reads.
    """
    arguments = (
        y, y_offset, y_stride, w, w_offset, w_stride, x, x_offset, x_stride, last, totals, totals_offset,
        k_start, k_stop, length, ahead, ROWS, COLUMNS, LANES, ASKS,
    )  # fmt: skip
    rows, columns, lanes, asks = (literal.literal_value for literal in (ROWS, COLUMNS, LANES, ASKS))
    # A sum waits for the sum before it, so narrow vectors need several rows at once to keep up.
    rows_at_once = max(16 // lanes, 1) if columns == 1 and rows > 1 else rows

    def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        numbers = [
            None if isinstance(kind, types.Array) else context.cast(builder, value, kind, types.int64)
            for kind, value in zip(signature.args, values, strict=True)
        ]
        y_pointer = data_pointer(context, builder, y, values[0], numbers[1])
        w_pointer = data_pointer(context, builder, w, values[3], numbers[4])
        x_pointer = data_pointer(context, builder, x, values[6], numbers[7])
        ask_pointer = data_pointer(context, builder, w, values[3], numbers[15])
        w_rows = [builder.gep(w_pointer, [builder.mul(numbers[5], number(row))]) for row in range(rows)]
        column_numbers = [at_most(builder, number(column), numbers[9]) for column in range(columns)]
        x_rows = [builder.gep(x_pointer, [builder.mul(numbers[8], place)]) for place in column_numbers]
        kept = data_pointer(context, builder, totals, values[10], numbers[11])
        places = [number(place * lanes) for place in range(rows * columns)]
        is_first = builder.icmp_signed("==", numbers[12], number(0))
        starts = _zeros_or_kept(builder, is_first, kept, places, lanes)
        sums: list[Value] = []
        for row in range(0, rows, rows_at_once):
            some = slice(row, row + rows_at_once)
            ask_place = builder.gep(ask_pointer, [builder.mul(numbers[5], number(row))])
            step = _Step(
                builder, w.dtype, x.dtype, lanes, w_rows[some], x_rows, numbers[14], ask_place if asks else None
            )
            sums += _loop(builder, step, starts[some] if columns == 1 else starts, numbers[12], numbers[13])
        is_last = builder.icmp_signed("==", numbers[13], numbers[14])
        with builder.if_else(is_last) as (then, otherwise):
            with then:
                y_rows = [builder.gep(y_pointer, [builder.mul(numbers[2], place)]) for place in column_numbers]
                if rows >= 4:
                    for start in range(0, len(sums), 4):
                        column, row = divmod(start, rows)
                        store(builder, sums_of_four(builder, sums[start : start + 4]), y_rows[column], number(row))
                else:
                    for start in range(0, columns, 4):
                        four = sums_of_four(builder, (sums[start:] * 4)[:4])
                        for column in range(start, min(start + 4, columns)):
                            total = builder.extract_element(four, ir.Constant(I32, column - start))
                            store(builder, total, y_rows[column], number(0))
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
    totals = [builder.phi(start.type) for start in starts]
    new_totals = step.emit(k, totals)
    next_k = builder.add(k, number(step.width))
    for phi, start, new in zip([k, *totals], [k_start, *starts], [next_k, *new_totals], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(new, builder.block)
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
        ask_place: Value | None,
    ) -> None:
        self.builder, self.lanes, self.w_rows, self.x_rows = builder, lanes, w_rows, x_rows
        self.w_type, self.x_type, self.length = w_type, x_type, length
        self.ask_place = ask_place
        assert (
            x_type == types.float32
            or (w_type == x_type == INT8 and lanes == LANES_INT8)
            or (w_type == x_type == BF16 and lanes == 16)
        )
        self.width = BUNDLE if w_type == INT8 else 2 * lanes  # numbers of every row that a step takes

    def emit(self, k: Value, totals: list[Value]) -> list[Value]:
        if self.w_type == INT8:
            return self._int8(k, totals)
        self._ask(k, self.width)
        if self.w_type != BF16:
            return self._plain(k, totals)
        pairs = [load_pairs(self.builder, row, k, self.lanes) for row in self.w_rows]
        if self.x_type == BF16:
            return self._bf16(k, pairs, totals)
        even = [even_of_pairs(self.builder, pair) for pair in pairs]
        totals = self._multiply_add(even, k, totals)
        odd = [odd_of_pairs(self.builder, pair) for pair in pairs]
        return self._multiply_add(odd, self.builder.add(k, number(self.lanes)), totals)

    def _ask(self, k: Value, count: int) -> None:
        """Ask for as many weights as the tile reads from k to k + count: lines one after another, not row by row."""
        if self.ask_place is None:
            return
        rows, width = len(self.w_rows), self.w_type.bitwidth // 8
        first = self.builder.mul(k, number(rows))
        for place in range(0, rows * count * width, LINE):
            offset = self.builder.add(first, number(place // width))
            prefetch(self.builder, self.builder.gep(self.ask_place, [offset]))

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
        """One bundle: its groups' whole-number sums, one in each lane, times their scales in w and in x."""
        builder, whole = self.builder, ir.VectorType(I32, LANES_INT8)
        groups = builder.udiv(at_most(builder, builder.sub(self.length, k), number(BUNDLE)), number(GROUP))
        x_bundle = builder.mul(builder.udiv(k, number(BUNDLE)), number(BUNDLE_BYTES))
        corrections_place = builder.add(x_bundle, number(BUNDLE))
        corrections = [load(builder, row, corrections_place, whole) for row in self.x_rows for _ in self.w_rows]
        sums = self._sums_of_groups(k, x_bundle, builder.mul(groups, number(4)), corrections)
        w_place = builder.add(self.length, builder.mul(builder.udiv(k, number(GROUP)), number(2)))
        x_place = builder.add(x_bundle, number(BUNDLE + 4 * LANES_INT8))
        w_bits = [load(builder, row, w_place, ir.VectorType(ir.IntType(16), LANES_INT8)) for row in self.w_rows]
        w_scales = [first_lanes(builder, widened_from_bf16(builder, bits), groups) for bits in w_bits]
        x_scales = [load(builder, row, x_place, vector_type(LANES_INT8)) for row in self.x_rows]
        scales = [builder.fmul(w, x) for x in x_scales for w in w_scales]
        floats = [builder.sitofp(total, vector_type(LANES_INT8)) for total in sums]
        return [multiply_add(builder, a, b, total) for a, b, total in zip(floats, scales, totals, strict=True)]

    def _sums_of_groups(self, k: Value, x_bundle: Value, stride: Value, corrections: list[Value]) -> list[Value]:
        """for j in range(16): add the products of vector j. A vector of w has `stride` bytes that count; of x, what
        comes after is 0.
        """
        builder = self.builder
        before = builder.block
        body, after = builder.append_basic_block("bundle_step"), builder.append_basic_block("bundle_end")
        builder.branch(body)
        builder.position_at_end(body)
        j, w_place = builder.phi(I64), builder.phi(I64)
        sums = [builder.phi(correction.type) for correction in corrections]
        self._ask(w_place, 4 * LANES_INT8)
        x_place = builder.add(x_bundle, builder.mul(j, number(4 * LANES_INT8)))
        ws = [load(builder, row, w_place, corrections[0].type) for row in self.w_rows]
        xs = [load(builder, row, x_place, corrections[0].type) for row in self.x_rows]
        pairs = [(w, x) for x in xs for w in ws]
        new_sums = [int8_dot(builder, total, w, x) for (w, x), total in zip(pairs, sums, strict=True)]
        next_j, next_w_place = builder.add(j, number(1)), builder.add(w_place, stride)
        for phi, start, new in zip(
            [j, w_place, *sums], [number(0), k, *corrections], [next_j, next_w_place, *new_sums], strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(new, body)
        builder.cbranch(builder.icmp_signed("<", next_j, number(GROUP // 4)), body, after)
        builder.position_at_end(after)
        return new_sums
