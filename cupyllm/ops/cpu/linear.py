"""Products with weights: linear, and the MLP's first half with SiLU(gate) * up at its end.

Activations are packed first (pack.py): normed and rounded once for all rows of weights. Then the work is cut into
chunks: a block of rows of weights, for a run of tokens. A chunk is its products (products.py), then bias, residual or
SiLU while the outputs are in a cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.numerics import load_number, silu, store_number
from cupyllm.ops.cpu.pack import packed_rows
from cupyllm.ops.cpu.products import FEW_TOKENS, chunks_of, products
from cupyllm.ops.cpu.team import THREADS, share_out

_BLOCK_BYTES = 1 << 19  # of weights in a chunk: half of a common L2 cache
_TOKENS_MANY = 64  # in a chunk


class LinearKernels(NamedTuple):
    """The kernels for one vector width."""

    linear: Any
    gate_up_silu_mul: Any


@cache
def linear_kernels(lanes: int, pairs: bool) -> LinearKernels:
    """For rows of weights whose length is a multiple of 2 * lanes; `pairs`: bf16 weights, float32 activations."""
    LANES, PAIRS = lanes, int(pairs)

    @kernel()
    def linear(
        team: Any, y: Any, x: Any, w: Any, bias: Any, residual: Any, norm: Any, eps: float, packed_like: Any
    ) -> None:
        """See linear_of."""
        linear_of(team, y, x, w, bias, residual, norm, eps, packed_like, PAIRS, LANES)

    @kernel()
    def gate_up_silu_mul(team: Any, y: Any, x: Any, w: Any, norm: Any, eps: float, packed_like: Any) -> None:
        """See gate_up_of."""
        gate_up_of(team, y, x, w, norm, eps, packed_like, PAIRS, LANES)

    return LinearKernels(linear, gate_up_silu_mul)


@part
def linear_of(
    team: Any, y: Any, x: Any, w: Any, bias: Any, residual: Any, norm: Any, eps: float, packed_like: Any,
    PAIRS: int, LANES: int,
) -> None:  # fmt: skip
    """y (T, N) = norm(x) (T, K) @ w.T (N, K) + bias + residual; an empty array leaves its part out.

    x is packed in the type of `packed_like`.
    """
    (T, K), N = x.shape, len(w)
    packed = packed_rows(team, x, norm, eps, packed_like, PAIRS, LANES)
    rows, tokens = chunk_shape(T, N, K * w.itemsize, team[THREADS])
    arguments = (y, w, packed, bias, residual, rows, tokens, K)
    share_out(team, linear_chunk, chunks_of(N, rows) * chunks_of(T, tokens), arguments, (LANES,))


@part
def gate_up_of(
    team: Any, y: Any, x: Any, w: Any, norm: Any, eps: float, packed_like: Any, PAIRS: int, LANES: int
) -> None:
    """y (T, I) = SiLU(gate) * up, where gate and up are norm(x) (T, K) @ w.T (2 * I, K)."""
    (T, K), I = x.shape, len(w) // 2  # noqa: E741
    packed = packed_rows(team, x, norm, eps, packed_like, PAIRS, LANES)
    rows, tokens = chunk_shape(T, I, 2 * K * w.itemsize, team[THREADS])
    arguments = (y, w, packed, rows, tokens, K)
    share_out(team, gate_up_chunk, chunks_of(I, rows) * chunks_of(T, tokens), arguments, (LANES,))


@part
def chunk_shape(num_tokens: int, num_rows: int, row_bytes: int, threads: int) -> Any:
    """Rows of weights and tokens in a chunk.

    Each chunk costs a little beside its work, but threads that are done early should find some left of the others'.
    """
    tokens = FEW_TOKENS if num_tokens <= FEW_TOKENS else _TOKENS_MANY
    rows = min(_BLOCK_BYTES // row_bytes, num_rows * chunks_of(num_tokens, tokens) // (4 * threads))
    return max(rows // 8 * 8, 8), tokens


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
                store_number(y, t * N + n, load_number(y, t * N + n) + load_number(bias, n))
    if len(residual):
        for t in range(t0, t1):
            for place in range(t * N + n0, t * N + n1):
                store_number(y, place, load_number(y, place) + load_number(residual, place))


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
            gate, up = load_number(gate_up, 2 * t * rows + n), load_number(gate_up, (2 * t + 1) * rows + n)
            store_number(y, (t0 + t) * I + n0 + n, silu(gate) * up)
