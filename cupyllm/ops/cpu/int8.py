"""int8 weights and activations: half the bytes of bf16, and four products in every lane of one instruction.

Rows of weights and of activations are cut into groups of 64, each with a scale of its own, so that one large number
does not take the precision of all others: w = (q - 128) * scale, with q from 1 to 255. Activations are quantised anew
for every product. The sum over a group is a whole number and exact; groups are added in float32.

Groups lie in bundles of up to 16, one for each lane of the instruction: first the numbers 0 to 3 of every group, then
4 to 7, and so on. After 16 such vectors every lane has its group's whole sum, so that one conversion and one product
with the scales do for 16 groups. The last bundle of a row may have fewer groups; its vectors are shorter.

The instruction multiplies bytes without a sign (w) by bytes with one (x); the 128 that is too much in every w is taken
off by beginning a group's sum with -128 times the sum of its x. That number belongs to x: packing makes it (pack.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.number_formats import bfloat16_to_float32
from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.dot_tile import BUNDLE, GROUP
from cupyllm.ops.cpu.numerics import load_number, store_number
from cupyllm.ops.cpu.vectors import LINE

_LARGEST = np.float32(127)
_ZERO = np.float32(0)


@dataclass(frozen=True)
class Int8Matrix:
    """A quantised matrix (N, K). rows is (N, K + K / 32) uint8: of each row the K numbers plus 128, in bundles, then
    the scales of its groups in bf16.
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
        bundles = [self.rows[:, k : min(k + BUNDLE, K)].reshape(N, GROUP // 4, -1, 4) for k in range(0, K, BUNDLE)]
        groups = np.concatenate([bundle.transpose(0, 2, 1, 3).reshape(N, -1, GROUP) for bundle in bundles], axis=1)
        return ((groups.astype(np.float32) - 128) * scales[..., None]).reshape(N, K)


def empty_int8(N: int, K: int) -> Int8Matrix:
    """Memory for a matrix; some more lies behind it, for a vector that begins in the last row's last bundle."""
    width = K // GROUP * (GROUP + 2)
    memory = np.zeros(N * width + LINE, np.uint8)
    return Int8Matrix(memory[: N * width].reshape(N, width))


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
                rows[n, place_of(i, K)] = np.uint8(min(max(whole, -127), 127) + 128)
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
            out[t, c] = np.float32(np.int32(row[place_of(c, C)]) - 128) * load_number(scale, 0)


@part
def place_of(k: int, K: int) -> int:
    """Where number k of a row of K lies."""
    bundle = k // BUNDLE * BUNDLE
    groups = min(K - bundle, BUNDLE) // GROUP
    return bundle + k % GROUP // 4 * 4 * groups + k % BUNDLE // GROUP * 4 + k % 4
