"""int8 weights and activations: half the bytes of bf16, and four products in every lane of one instruction.

Rows of weights and of activations are cut into groups of 64, each with a scale of its own, so that one large number
does not take the precision of all others: w = (q - 128) * scale, with q from 1 to 255. Activations are quantised anew
for every product. The sum over a group is a whole number and exact; groups are added in float32, in order.

The instruction multiplies bytes without a sign (w) by bytes with one (x); the 128 that is too much in every w is taken
off by beginning a group's sum with -128 times the sum of its x. That number belongs to x, so `pack_int8` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.number_formats import bfloat16_to_float32
from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.dot_tile import GROUP, GROUP_BYTES
from cupyllm.ops.cpu.numerics import load_number, store_bits, store_number
from cupyllm.ops.cpu.rms import inverse_root_mean_square

_LARGEST = np.float32(127)
_ZERO = np.float32(0)


@dataclass(frozen=True)
class Int8Matrix:
    """A quantised matrix (N, K). rows is (N, K + K / 32) uint8: of each row the K numbers plus 128, then the scales of
    its groups in bf16.
    """

    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.rows.shape[1] // (GROUP + 2) * GROUP

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def __len__(self) -> int:
        return len(self.rows)

    def dequantised(self) -> np.ndarray:
        """The numbers that it stands for: (N, K) float32."""
        N, K = self.shape
        scales = bfloat16_to_float32(np.ascontiguousarray(self.rows[:, K:]).view(np.uint16))
        whole = self.rows[:, :K].astype(np.float32) - 128
        return (whole.reshape(N, -1, GROUP) * scales[..., None]).reshape(N, K)


@kernel()
def quantise_rows(rows: Any, w: Any) -> None:
    """The rows of an Int8Matrix from w (N, K): each number to nearest, the largest of a group about 127."""
    N, K = w.shape
    scale = np.empty(1, np.uint16)
    for n in range(N):
        for k in range(0, K, GROUP):
            largest = _ZERO
            for i in range(k, k + GROUP):
                largest = max(largest, abs(load_number(w, n * K + i)))
            store_number(scale, 0, largest / _LARGEST)
            rounded = load_number(scale, 0)
            inverse = np.float32(1) / rounded if rounded > _ZERO else _ZERO
            for i in range(k, k + GROUP):
                whole = np.int32(np.rint(load_number(w, n * K + i) * inverse))
                rows[n, i] = np.uint8(min(max(whole, -127), 127) + 128)
            rows[n, K + k // GROUP * 2] = scale[0] & 0xFF
            rows[n, K + k // GROUP * 2 + 1] = scale[0] >> 8


@kernel()
def embedding_int8(team: Any, out: Any, token_ids: Any, rows: Any) -> None:
    """out (T, C) = the rows token_ids of a quantised table (V, C), as float32."""
    C = out.shape[1]
    scale = np.empty(1, np.uint16)
    for t in range(len(token_ids)):
        row = rows[token_ids[t]]
        for c in range(C):
            place = C + c // GROUP * 2
            scale[0] = row[place] | np.uint16(row[place + 1]) << 8
            out[t, c] = np.float32(np.int32(row[c]) - 128) * load_number(scale, 0)


@part
def pack_int8(chunk: int, size: int, packed: Any, x: Any, norm: Any, eps: float, PAIRS: bool, LANES: int) -> None:
    """packed[t] = norm(x[t]) in int8, for `size` tokens.

    A group of 64 takes 192 bytes: its numbers, 16 times -128 times the sum of four (int32), its scale (float32).
    """
    K, normed = x.shape[1], len(norm) > 0
    row = np.empty(K, np.float32)
    numbers = np.empty(GROUP, np.int32)
    for t in range(chunk * size, min((chunk + 1) * size, len(x))):
        root = inverse_root_mean_square(x, t * K, K, eps, LANES) if normed else np.float32(1)
        for k in range(K):
            row[k] = x[t, k] * root * norm[k] if normed else x[t, k]
        for k in range(0, K, GROUP):
            largest, spoiled = _ZERO, _ZERO
            for i in range(GROUP):
                largest = max(largest, abs(row[k + i]))
                spoiled += row[k + i] * _ZERO  # NaN for what is not finite
            inverse = _LARGEST / largest if largest > _ZERO else _ZERO
            for i in range(GROUP):
                numbers[i] = np.int32(np.rint(row[k + i] * inverse))
            place = t * packed.shape[1] + k // GROUP * GROUP_BYTES
            for lane in range(GROUP // 4):
                a, b, c, d = numbers[4 * lane], numbers[4 * lane + 1], numbers[4 * lane + 2], numbers[4 * lane + 3]
                four = (a & 0xFF) | (b & 0xFF) << 8 | (c & 0xFF) << 16 | (d & 0xFF) << 24
                store_bits(packed, place + 4 * lane, np.int32(four))
                store_bits(packed, place + GROUP + 4 * lane, np.int32(-128 * (a + b + c + d)))
            store_bits(packed, place + 2 * GROUP, largest / _LARGEST + spoiled)
