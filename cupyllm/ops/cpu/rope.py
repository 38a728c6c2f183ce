"""RoPE and the write to the cache; Qwen3's norm of every head comes first."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.numerics import load_number, store_number
from cupyllm.ops.cpu.products import FEW_TOKENS, chunks_of
from cupyllm.ops.cpu.rms import inverse_root_mean_square
from cupyllm.ops.cpu.team import share_out


@cache
def rope_kernel(lanes: int) -> Any:
    """For head sizes that are multiples of 2 * lanes."""
    LANES = lanes

    @kernel()
    def rope_and_kv_write(
        team: Any, q: Any, qkv: Any, table: Any, positions: Any, slots: Any, keys: Any, values: Any,
        q_norm: Any, k_norm: Any, eps: float,
    ) -> None:  # fmt: skip
        """See rope_of."""
        rope_of(team, q, qkv, table, positions, slots, keys, values, q_norm, k_norm, eps, LANES)

    return rope_and_kv_write


@part
def rope_of(
    team: Any, q: Any, qkv: Any, table: Any, positions: Any, slots: Any, keys: Any, values: Any,
    q_norm: Any, k_norm: Any, eps: float, LANES: int,
) -> None:  # fmt: skip
    """q (T, H, D) from qkv (T, (H + 2 * KH) * D); keys and values (P, page_size, KH, D) get the tokens' slots."""
    arguments = (q, qkv, table, positions, slots, keys, values, q_norm, k_norm, eps)
    share_out(team, rope_chunk, chunks_of(len(qkv), FEW_TOKENS), arguments, (LANES,))


@part
def rope_chunk(
    chunk: int, q: Any, qkv: Any, table: Any, positions: Any, slots: Any, keys: Any, values: Any,
    q_norm: Any, k_norm: Any, eps: float, LANES: int,
) -> None:  # fmt: skip
    """FEW_TOKENS tokens."""
    H, KH, D = q.shape[1], keys.shape[2], keys.shape[3]
    first = chunk * FEW_TOKENS
    for t in range(first, min(first + FEW_TOKENS, len(qkv))):
        start, slot, angles = t * (H + 2 * KH) * D, slots[t] * KH * D, positions[t] * D
        for head in range(H):
            rotate(q, (t * H + head) * D, qkv, start + head * D, table, angles, D, q_norm, eps, LANES)
        for head in range(KH):
            rotate(keys, slot + head * D, qkv, start + (H + head) * D, table, angles, D, k_norm, eps, LANES)
        for d in range(KH * D):
            store_number(values, slot + d, load_number(qkv, start + (H + KH) * D + d))


@part
def rotate(
    out: Any, out_offset: int, x: Any, x_offset: int, table: Any, angles: int, D: int, norm: Any, eps: float, LANES: int
) -> None:
    """Norm one head, rotate its halves against each other, write it. table has, from `angles` on, cosines, then sines.

    Numbers are read by their place in memory: an index could be negative, and loops over such do not become vectors.
    """
    half, normed = D // 2, len(norm) > 0
    scale = inverse_root_mean_square(x, x_offset, D, eps, LANES) if normed else np.float32(1)
    for d in range(half):
        first, second = load_number(x, x_offset + d) * scale, load_number(x, x_offset + half + d) * scale
        if normed:
            first, second = first * load_number(norm, d), second * load_number(norm, half + d)
        cos, sin = load_number(table, angles + d), load_number(table, angles + half + d)
        store_number(out, out_offset + d, first * cos - second * sin)
        store_number(out, out_offset + half + d, second * cos + first * sin)
