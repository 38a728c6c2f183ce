"""A block of rows of weights times a run of tokens: in which order its tiles are computed, and what stays in a cache.

One token: row after row, as fast as memory gives them.

A few tokens: their activations stay in the L1 cache, and every row of weights is read from memory once and used for all
of them, so a step costs the time of reading the weights. Where whole rows of activations would not fit, a piece of each
of 16 rows of weights is worked on before their next pieces.

A prompt: the activations of a group of tokens stay in the L1 cache while the block's rows come from the L2 cache, four
at a time, so that arithmetic is the limit.

A sum has the same order in all three (dot_tile.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.ops.cpu.compile import part
from cupyllm.ops.cpu.dot_tile import dot_tile

FEW_TOKENS = 16
PIECE = 1024  # numbers of a row; for int8 a bundle
_FEW_ROWS = 16
_L1_BYTES = 1 << 15  # of activations: most of a common L1 cache
_READ_AHEAD = 1 << 14  # bytes that weights are asked for before they are read; they fit many times into an L2 cache


@part
def chunks_of(count: int, size: int) -> int:
    """How many chunks of `size` things there are."""
    return (count + size - 1) // size


@part
def products(
    y: Any, row: int, column: int, w: Any, first: int, last: int, packed: Any, start: int, stop: int, K: int, LANES: int
) -> None:
    """y[row:, column:] = the products of tokens start:stop and the rows first:last of w.

    K is the number of products in a sum; a row of w or of packed may be longer (int8.py).
    """
    place = row * y.shape[1] + column  # in y's memory
    if stop - start == 1:
        one_token(y, place, w, first, last, packed, start, K, LANES)
    elif stop - start <= FEW_TOKENS:
        few_tokens(y, place, w, first, last, packed, start, stop, K, LANES)
    else:
        many_tokens(y, place, w, first, last, packed, start, stop, K, LANES)


@part
def one_token(y: Any, place: int, w: Any, first: int, last: int, packed: Any, t: int, K: int, LANES: int) -> None:
    """y's memory from `place` on = the products of token t and the rows first:last of w."""
    W, x = w.shape[1], t * packed.shape[1]
    ahead, n = _READ_AHEAD // w.itemsize, first
    while n + 8 <= last:
        row = n * W
        dot_tile(y, place, 0, w, row, W, packed, x, 0, 0, y, 0, 0, K, K, row + ahead, 8, 1, LANES, 1)
        place, n = place + 8, n + 8
    while n < last:
        row = n * W
        dot_tile(y, place, 0, w, row, W, packed, x, 0, 0, y, 0, 0, K, K, row + ahead, 1, 1, LANES, 1)
        place, n = place + 1, n + 1


@part
def few_tokens(
    y: Any, place: int, w: Any, first: int, last: int, packed: Any, start: int, stop: int, K: int, LANES: int
) -> None:
    """y's memory from `place` on = the products of tokens start:stop and the rows first:last of w."""
    W, num_bytes, piece = w.shape[1], (stop - start) * packed.shape[1] * packed.itemsize, K
    if num_bytes > _L1_BYTES:  # with rows of weights and totals beside them half of it has to do
        piece = min(K, max(_L1_BYTES * K // (2 * num_bytes) // PIECE, 1) * PIECE)
    totals = np.empty(_FEW_ROWS * FEW_TOKENS * LANES if piece < K else 0, np.float32)
    for n0 in range(first, last, _FEW_ROWS):
        ask = (n0 + _FEW_ROWS) * W  # the rows after these, in the order of their addresses
        for k0 in range(0, K, piece):
            k1 = min(k0 + piece, K)
            for n in range(n0, min(n0 + _FEW_ROWS, last)):
                kept = (n - n0) * FEW_TOKENS * LANES
                one_row(y, place + n - first, w, n, packed, start, stop, ask - k0, totals, kept, k0, k1, K, LANES)
                ask += k1 - k0


@part
def many_tokens(
    y: Any, place: int, w: Any, first: int, last: int, packed: Any, start: int, stop: int, K: int, LANES: int
) -> None:
    """y's memory from `place` on = the products of tokens start:stop and the rows first:last of w."""
    X, piece, num_rows, rest = packed.shape[1], min(K, PIECE), last - first, (last - first) % 4
    group = max(_L1_BYTES // (piece * X // K * packed.itemsize) // 8 * 8, 8)
    totals = np.empty(chunks_of(stop - start, 8) * 8 * num_rows * LANES if piece < K else 0, np.float32)
    for k0 in range(0, K, piece):
        k1 = min(k0 + piece, K)
        for t0 in range(start, stop, group):
            t1, column = min(t0 + group, stop), place + (t0 - start) * y.shape[1]
            kept, per_row = (t0 - start) * num_rows * LANES, chunks_of(t1 - t0, 8) * 8 * LANES
            for n in range(first, last - rest, 4):
                four_rows(y, column, w, n, packed, t0, t1, t0 == start, totals, kept, k0, k1, K, LANES)
                column, kept = column + 4, kept + 4 * per_row
            for n in range(last - rest, last):
                one_row(y, column, w, n, packed, t0, t1, n * w.shape[1], totals, kept, k0, k1, K, LANES)
                column, kept = column + 1, kept + per_row


@part
def one_row(
    y: Any, place: int, w: Any, n: int, packed: Any, start: int, stop: int, ask: int,
    totals: Any, kept: int, k0: int, k1: int, K: int, LANES: int,
) -> None:  # fmt: skip
    """y's memory from `place` = the products of tokens start:stop and row n of w, from k0 to k1."""
    W, X, stride, row = w.shape[1], packed.shape[1], y.shape[1], n * w.shape[1]
    for t in range(start, stop, 8):
        x, end = t * X, stop - 1 - t
        if end < 4:
            dot_tile(y, place, stride, w, row, W, packed, x, X, end, totals, kept, k0, k1, K, ask, 1, 4, LANES, 1)
        else:
            dot_tile(y, place, stride, w, row, W, packed, x, X, end, totals, kept, k0, k1, K, ask, 1, 8, LANES, 1)
        place, kept = place + 8 * stride, kept + 8 * LANES


@part
def four_rows(
    y: Any, place: int, w: Any, n: int, packed: Any, start: int, stop: int, from_memory: bool,
    totals: Any, kept: int, k0: int, k1: int, K: int, LANES: int,
) -> None:  # fmt: skip
    """y's memory from `place` = the products of tokens start:stop and the rows n to n + 3 of w, from k0 to k1."""
    W, X, stride, row = w.shape[1], packed.shape[1], y.shape[1], n * w.shape[1]
    ask = row + _READ_AHEAD // w.itemsize
    for t in range(start, stop, 4):
        x, end = t * X, stop - 1 - t
        if from_memory and t == start:
            dot_tile(y, place, stride, w, row, W, packed, x, X, end, totals, kept, k0, k1, K, ask, 4, 4, LANES, 1)
        else:
            dot_tile(y, place, stride, w, row, W, packed, x, X, end, totals, kept, k0, k1, K, ask, 4, 4, LANES, 0)
        place, kept = place + 4 * stride, kept + 16 * LANES
