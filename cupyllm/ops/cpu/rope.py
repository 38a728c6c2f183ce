"""RoPE and the write to the cache; Qwen3's norm of every head comes first."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.linear import FEW_TOKENS, chunks_of
from cupyllm.ops.cpu.numerics import store_number
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
        """q (T, H, D) from qkv (T, (H + 2 * KH) * D); keys and values (P, page_size, KH, D) get the tokens' slots."""
        arguments = (q, qkv, table, positions, slots, keys, values, q_norm, k_norm, eps)
        share_out(team, rope_chunk, chunks_of(len(qkv), FEW_TOKENS), arguments, (LANES,))

    return rope_and_kv_write


@part
def rope_chunk(
    chunk: int, q: Any, qkv: Any, table: Any, positions: Any, slots: Any, keys: Any, values: Any,
    q_norm: Any, k_norm: Any, eps: float, LANES: int,
) -> None:  # fmt: skip
    """FEW_TOKENS tokens."""
    H, KH, D = q.shape[1], keys.shape[2], keys.shape[3]
    flat = qkv.reshape(-1)  # token after token: the heads of q, of k, of v
    first = chunk * FEW_TOKENS
    for t in range(first, min(first + FEW_TOKENS, len(qkv))):
        start, slot, angles = t * (H + 2 * KH) * D, slots[t] * KH * D, table[positions[t]]
        for head in range(H):
            rotate(q, (t * H + head) * D, flat, start + head * D, angles, q_norm, eps, LANES)
        for head in range(KH):
            rotate(keys, slot + head * D, flat, start + (H + head) * D, angles, k_norm, eps, LANES)
        for d in range(KH * D):
            store_number(values, slot + d, flat[start + (H + KH) * D + d])


@part
def rotate(out: Any, out_offset: int, x: Any, x_offset: int, angles: Any, norm: Any, eps: float, LANES: int) -> None:
    """Norm one head, rotate its halves against each other, write it. angles (D,): cosines, then sines."""
    D, normed = len(angles), len(norm) > 0
    scale = inverse_root_mean_square(x, x_offset, D, eps, LANES) if normed else np.float32(1)
    for d in range(D // 2):
        first, second = x[x_offset + d] * scale, x[x_offset + D // 2 + d] * scale
        if normed:
            first, second = first * norm[d], second * norm[D // 2 + d]
        cos, sin = angles[d], angles[D // 2 + d]
        store_number(out, out_offset + d, first * cos - second * sin)
        store_number(out, out_offset + D // 2 + d, second * cos + first * sin)
