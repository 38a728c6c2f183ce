"""Products with weights: linear, and the MLP's first half with SiLU(gate) * up at its end.

The work is cut into chunks: a block of rows of weights, for a run of tokens. Inside a chunk,

    for a group of its tokens        all, when they are few; else 4
        for 4 rows of the block      one dot_tile for every 4 tokens of the group
        what comes after             bias, residual or SiLU, while the outputs are in the L1 cache

A few tokens: a block's rows are read from memory once, ahead of time, and used for all tokens while they are in the L1
cache, so a step costs the time of reading the weights. A prompt: the group's activations stay in the L1 cache while the
block's rows come from the L2 cache, so arithmetic is the limit. A sum has the same order in both (dot_tile.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.dot_tile import dot_tile
from cupyllm.ops.cpu.int8 import pack_int8
from cupyllm.ops.cpu.numerics import load_number, silu, store_number
from cupyllm.ops.cpu.rms import inverse_root_mean_square
from cupyllm.ops.cpu.team import THREADS, share_out

FEW_TOKENS = 16
_BLOCK_BYTES = 1 << 19  # of weights in a chunk: half of a common L2 cache
_TOKENS_MANY = 64  # in a chunk
_GROUP_BYTES = 1 << 15  # of activations: most of a common L1 cache
_PIECE = 1024  # numbers of a row that are worked on before the next, where a group of whole rows would not fit


class LinearKernels(NamedTuple):
    """The kernels for one vector width."""

    linear: Any
    gate_up_silu_mul: Any


@cache
def linear_kernels(lanes: int, bf16_pairs: bool, int8: bool) -> LinearKernels:
    """For rows of weights whose length is a multiple of 2 * lanes; `bf16_pairs`: bf16 weights, float32 activations."""
    LANES, PAIRS = lanes, bf16_pairs
    pack = pack_int8 if int8 else pack_floats

    @kernel()
    def linear(team: Any, y: Any, x: Any, w: Any, bias: Any, residual: Any, norm: Any, eps: float, packed: Any) -> None:
        """y (T, N) = norm(x) (T, K) @ w.T (N, K) + bias + residual; an empty array leaves its part out."""
        (T, K), N = x.shape, len(w)
        share_out(team, pack, chunks_of(T, FEW_TOKENS), (FEW_TOKENS, packed, x, norm, eps), (PAIRS, LANES))
        rows, tokens = chunk_shape(T, N, K * w.itemsize, team[THREADS])
        arguments = (y, w, packed, bias, residual, rows, tokens, K)
        share_out(team, linear_chunk, chunks_of(N, rows) * chunks_of(T, tokens), arguments, (LANES,))

    @kernel()
    def gate_up_silu_mul(team: Any, y: Any, x: Any, w: Any, norm: Any, eps: float, packed: Any) -> None:
        """y (T, I) = SiLU(gate) * up, where gate and up are norm(x) (T, K) @ w.T (2 * I, K)."""
        (T, K), I = x.shape, len(w) // 2  # noqa: E741
        share_out(team, pack, chunks_of(T, FEW_TOKENS), (FEW_TOKENS, packed, x, norm, eps), (PAIRS, LANES))
        rows, tokens = chunk_shape(T, I, 2 * K * w.itemsize, team[THREADS])
        arguments = (y, w, packed, rows, tokens, K)
        share_out(team, gate_up_chunk, chunks_of(I, rows) * chunks_of(T, tokens), arguments, (LANES,))

    return LinearKernels(linear, gate_up_silu_mul)


@part
def chunks_of(count: int, size: int) -> int:
    """How many chunks of `size` things there are."""
    return (count + size - 1) // size


@part
def chunk_shape(num_tokens: int, num_rows: int, row_bytes: int, threads: int) -> Any:
    """Rows of weights and tokens in a chunk.

    Each chunk costs a little beside its work, but threads that are done early should find some left of the others'.
    """
    rows = _BLOCK_BYTES // row_bytes
    if num_tokens <= FEW_TOKENS:
        return max(min(rows, num_rows // (4 * threads)) // 8 * 8, 8), FEW_TOKENS
    return max(rows // 4 * 4, 16), _TOKENS_MANY


@part
def linear_chunk(
    chunk: int, y: Any, w: Any, packed: Any, bias: Any, residual: Any, rows: int, tokens: int, K: int, LANES: int
) -> None:
    """`rows` columns of y for `tokens` tokens."""
    T, N = y.shape
    token_chunks = chunks_of(T, tokens)
    n0, t0 = chunk // token_chunks * rows, chunk % token_chunks * tokens
    n1, t1 = min(n0 + rows, N), min(t0 + tokens, T)
    products(y, t0, n0, w, n0, n1, packed, t0, t1, K, LANES)
    if len(bias):
        for t in range(t0, t1):
            for n in range(n0, n1):
                y[t, n] += load_number(bias, n)
    if len(residual):
        for t in range(t0, t1):
            for n in range(n0, n1):
                y[t, n] += residual[t, n]


@part
def gate_up_chunk(chunk: int, y: Any, w: Any, packed: Any, rows: int, tokens: int, K: int, LANES: int) -> None:
    """`rows` columns of y for `tokens` tokens."""
    T, I = y.shape  # noqa: E741
    token_chunks = chunks_of(T, tokens)
    n0, t0 = chunk // token_chunks * rows, chunk % token_chunks * tokens
    n1, t1 = min(n0 + rows, I), min(t0 + tokens, T)
    gate_up = np.empty((t1 - t0, 2 * rows), np.float32)
    products(gate_up, 0, 0, w, n0, n1, packed, t0, t1, K, LANES)
    products(gate_up, 0, rows, w, I + n0, I + n1, packed, t0, t1, K, LANES)
    for t in range(t1 - t0):
        for n in range(n1 - n0):
            y[t0 + t, n0 + n] = silu(gate_up[t, n]) * gate_up[t, rows + n]


@part
def products(
    y: Any, row: int, column: int, w: Any, first: int, last: int, packed: Any, start: int, stop: int, K: int, LANES: int
) -> None:
    """y[row:, column:] = the products of tokens start:stop and the rows first:last of w."""
    W, X, stride = w.shape[1], packed.shape[1], y.shape[1]  # numbers of memory in a row
    if stop - start == 1:
        one_token(y, row, column, w, first, last, packed, start, K, LANES)
        return
    few = stop - start <= FEW_TOKENS
    piece = K if few else min(K, _PIECE)
    group = FEW_TOKENS if few else max(_GROUP_BYTES // (piece * X // K * packed.itemsize) // 4 * 4, 4)
    totals = np.empty((stop - start) * (last - first) * LANES if piece < K else 0, np.float32)
    for k0 in range(0, K, piece):
        k1 = min(k0 + piece, K)
        for t0 in range(start, stop, group):
            t1 = min(t0 + group, stop)
            for n in range(first, last - 3, 4):
                kept = ((t0 - start) * (last - first) + (n - first) * (t1 - t0)) * LANES
                place = (row + t0 - start) * stride + column + n - first
                four_rows(y, place, w, n, packed, t0, t1, t0 == start, totals, kept, k0, k1, K, LANES)
    for n in range(last - (last - first) % 4, last):  # the rest
        for t in range(start, stop):
            place = (row + t - start) * stride + column + n - first
            dot_tile(y, place, stride, w, n * W, W, packed, t * X, X, totals, 0, 0, K, K, 1, 1, LANES, 0)


@part
def one_token(
    y: Any, row: int, column: int, w: Any, first: int, last: int, packed: Any, t: int, K: int, LANES: int
) -> None:
    """y[row, column:] = the products of token t and the rows first:last of w."""
    W, X, place, n = w.shape[1], packed.shape[1], row * y.shape[1] + column, first
    while n + 8 <= last:
        dot_tile(y, place + n - first, 0, w, n * W, W, packed, t * X, 0, y, 0, 0, K, K, 8, 1, LANES, 1)
        n += 8
    while n < last:
        dot_tile(y, place + n - first, 0, w, n * W, W, packed, t * X, 0, y, 0, 0, K, K, 1, 1, LANES, 1)
        n += 1


@part
def four_rows(
    y: Any, place: int, w: Any, n: int, packed: Any, start: int, stop: int, from_memory: bool,
    totals: Any, kept: int, k0: int, k1: int, K: int, LANES: int,
) -> None:  # fmt: skip
    """y's memory from `place` = the products of tokens start:stop and the rows n to n + 3 of w, from k0 to k1."""
    W, X, stride = w.shape[1], packed.shape[1], y.shape[1]  # numbers of memory in a row
    t = start
    while t + 4 <= stop:
        if from_memory and t == start:
            dot_tile(y, place, stride, w, n * W, W, packed, t * X, X, totals, kept, k0, k1, K, 4, 4, LANES, 1)
        else:
            dot_tile(y, place, stride, w, n * W, W, packed, t * X, X, totals, kept, k0, k1, K, 4, 4, LANES, 0)
        t, place, kept = t + 4, place + 4 * stride, kept + 16 * LANES
    if t + 2 <= stop:
        dot_tile(y, place, stride, w, n * W, W, packed, t * X, X, totals, kept, k0, k1, K, 4, 2, LANES, 1)
        t, place, kept = t + 2, place + 2 * stride, kept + 8 * LANES
    if t < stop:
        dot_tile(y, place, stride, w, n * W, W, packed, t * X, X, totals, kept, k0, k1, K, 4, 1, LANES, 0)


@part
def pack_floats(chunk: int, size: int, packed: Any, x: Any, norm: Any, eps: float, PAIRS: bool, LANES: int) -> None:
    """packed[t] = norm(x[t]), as float32 or bf16, for `size` tokens.

    PAIRS: of 2 * LANES numbers the even ones come first, then the odd ones, as dot_tile widens bf16 weights.
    """
    K, normed = x.shape[1], len(norm) > 0
    for t in range(chunk * size, min((chunk + 1) * size, len(x))):
        scale = inverse_root_mean_square(x, t * K, K, eps, LANES) if normed else np.float32(1)
        for k in range(0, K, 2 * LANES):
            for lane in range(LANES):
                even, odd = (k + 2 * lane, k + 2 * lane + 1) if PAIRS else (k + lane, k + LANES + lane)
                a, b = x[t, even] * scale, x[t, odd] * scale
                if normed:
                    a, b = a * norm[even], b * norm[odd]
                store_number(packed, t * K + k + lane, a)
                store_number(packed, t * K + k + LANES + lane, b)
