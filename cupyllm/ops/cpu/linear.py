"""Products with weights: linear, and the MLP's first half with SiLU(gate) * up at its end.

The work is cut into chunks: a block of rows of weights, for a run of tokens. Inside a chunk,

    for a group of its tokens        all, when they are few; else 4
        for 4 rows of the block      one dot_tile for every 4 tokens of the group
        what comes after             bias, residual or SiLU, while the outputs are in the L1 cache

A few tokens: a block's rows are read from memory once and used for all tokens while they are in the L1 cache, so a
step costs the time of reading the weights. A prompt: the group's activations stay in the L1 cache while the block's
rows come from the L2 cache, so arithmetic is the limit. An output's sum has the same order in both (dot_tile.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.dot_tile import dot_tile
from cupyllm.ops.cpu.numerics import load_number, silu, store_number
from cupyllm.ops.cpu.team import share_out

FEW_TOKENS = 16
_BLOCK_BYTES_FEW = 1 << 17  # of weights: many times what a thread fetches ahead
_BLOCK_BYTES_MANY = 1 << 19  # half of a common L2 cache
_TOKENS_MANY = 64  # in a chunk


class LinearKernels(NamedTuple):
    """The kernels for one vector width."""

    linear: Any
    gate_up_silu_mul: Any


@cache
def linear_kernels(lanes: int, bf16_pairs: bool) -> LinearKernels:
    """For rows of weights whose length is a multiple of 2 * lanes; `bf16_pairs`: bf16 weights, float32 activations."""
    LANES, PAIRS = lanes, bf16_pairs

    @kernel()
    def linear(team: Any, y: Any, x: Any, w: Any, bias: Any, residual: Any, norm: Any, eps: float, packed: Any) -> None:
        """y (T, N) = norm(x) (T, K) @ w.T (N, K) + bias + residual; an empty array leaves its part out."""
        T, (N, K) = len(x), w.shape
        share_out(team, pack, chunks_of(T, FEW_TOKENS), (packed, x, norm, eps), (PAIRS, LANES))
        rows, tokens = chunk_shape(T, K * w.itemsize)
        arguments = (y, w, packed, bias, residual, rows, tokens)
        share_out(team, linear_chunk, chunks_of(N, rows) * chunks_of(T, tokens), arguments, (LANES,))

    @kernel()
    def gate_up_silu_mul(team: Any, y: Any, x: Any, w: Any, norm: Any, eps: float, packed: Any) -> None:
        """y (T, I) = SiLU(gate) * up, where gate and up are norm(x) (T, K) @ w.T (2 * I, K)."""
        T, I, K = len(x), len(w) // 2, w.shape[1]  # noqa: E741
        share_out(team, pack, chunks_of(T, FEW_TOKENS), (packed, x, norm, eps), (PAIRS, LANES))
        rows, tokens = chunk_shape(T, 2 * K * w.itemsize)
        arguments = (y, w, packed, rows, tokens)
        share_out(team, gate_up_chunk, chunks_of(I, rows) * chunks_of(T, tokens), arguments, (LANES,))

    return LinearKernels(linear, gate_up_silu_mul)


@part
def chunks_of(count: int, size: int) -> int:
    """How many chunks of `size` things there are."""
    return (count + size - 1) // size


@part
def chunk_shape(num_tokens: int, row_bytes: int) -> Any:
    """Rows of weights and tokens in a chunk."""
    if num_tokens <= FEW_TOKENS:
        return max(_BLOCK_BYTES_FEW // row_bytes // 4 * 4, 4), FEW_TOKENS
    return max(_BLOCK_BYTES_MANY // row_bytes // 4 * 4, 16), _TOKENS_MANY


@part
def linear_chunk(
    chunk: int, y: Any, w: Any, packed: Any, bias: Any, residual: Any, rows: int, tokens: int, LANES: int
) -> None:
    """`rows` columns of y for `tokens` tokens."""
    T, N = y.shape
    token_chunks = chunks_of(T, tokens)
    n0, t_first = chunk // token_chunks * rows, chunk % token_chunks * tokens
    n1, t_last = min(n0 + rows, N), min(t_first + tokens, T)
    group = FEW_TOKENS if T <= FEW_TOKENS else 4
    for t0 in range(t_first, t_last, group):
        t1 = min(t0 + group, t_last)
        products(y, t0, n0, w, n0, n1, packed, t0, t1, LANES)
        if len(bias):
            for t in range(t0, t1):
                for n in range(n0, n1):
                    y[t, n] += load_number(bias, n)
        if len(residual):
            for t in range(t0, t1):
                for n in range(n0, n1):
                    y[t, n] += residual[t, n]


@part
def gate_up_chunk(chunk: int, y: Any, w: Any, packed: Any, rows: int, tokens: int, LANES: int) -> None:
    """`rows` columns of y for `tokens` tokens."""
    T, I = y.shape  # noqa: E741
    token_chunks = chunks_of(T, tokens)
    n0, t_first = chunk // token_chunks * rows, chunk % token_chunks * tokens
    n1, t_last = min(n0 + rows, I), min(t_first + tokens, T)
    group = FEW_TOKENS if T <= FEW_TOKENS else 4
    gate_up = np.empty((group, 2 * rows), np.float32)
    for t0 in range(t_first, t_last, group):
        t1 = min(t0 + group, t_last)
        products(gate_up, 0, 0, w, n0, n1, packed, t0, t1, LANES)
        products(gate_up, 0, rows, w, I + n0, I + n1, packed, t0, t1, LANES)
        for t in range(t1 - t0):
            for n in range(n1 - n0):
                y[t0 + t, n0 + n] = silu(gate_up[t, n]) * gate_up[t, rows + n]


@part
def products(
    y: Any, row: int, column: int, w: Any, first: int, last: int, packed: Any, start: int, stop: int, LANES: int
) -> None:
    """y[row:, column:] = the products of tokens start:stop and the rows first:last of w."""
    K, stride = w.shape[1], y.shape[1]
    n = first
    while n + 4 <= last:
        t = start
        while t + 4 <= stop:
            place = (row + t - start) * stride + column + n - first
            dot_tile(y, place, stride, w, n * K, K, packed, t * K, K, K, 4, 4, LANES)
            t += 4
        if t + 2 <= stop:
            place = (row + t - start) * stride + column + n - first
            dot_tile(y, place, stride, w, n * K, K, packed, t * K, K, K, 4, 2, LANES)
            t += 2
        if t < stop:
            place = (row + t - start) * stride + column + n - first
            dot_tile(y, place, stride, w, n * K, K, packed, t * K, K, K, 4, 1, LANES)
        n += 4
    while n < last:
        for t in range(start, stop):
            place = (row + t - start) * stride + column + n - first
            dot_tile(y, place, stride, w, n * K, K, packed, t * K, K, K, 1, 1, LANES)
        n += 1


@part
def pack(chunk: int, packed: Any, x: Any, norm: Any, eps: float, PAIRS: bool, LANES: int) -> None:
    """packed[t] = norm(x[t]), as float32 or bf16, for FEW_TOKENS tokens.

    PAIRS: of 2 * LANES numbers the even ones come first, then the odd ones, as dot_tile widens bf16 weights.
    """
    K, normed = x.shape[1], len(norm) > 0
    first = chunk * FEW_TOKENS
    for t in range(first, min(first + FEW_TOKENS, len(x))):
        scale = inverse_root_mean_square(x, t * K, K, eps, LANES) if normed else np.float32(1)
        for k in range(0, K, 2 * LANES):
            for lane in range(LANES):
                even, odd = (k + 2 * lane, k + 2 * lane + 1) if PAIRS else (k + lane, k + LANES + lane)
                a, b = x[t, even] * scale, x[t, odd] * scale
                if normed:
                    a, b = a * norm[even], b * norm[odd]
                store_number(packed, t * K + k + lane, a)
                store_number(packed, t * K + k + LANES + lane, b)


@part
def inverse_root_mean_square(x: Any, offset: int, length: int, eps: float, LANES: int) -> Any:
    """1 / sqrt(mean(x ** 2) + eps) of `length` numbers of x's memory."""
    squares = np.empty(1, np.float32)
    dot_tile(squares, 0, 0, x, offset, 0, x, offset, 0, length, 1, 1, LANES)
    return np.float32(1) / np.sqrt(squares[0] / np.float32(length) + np.float32(eps))
