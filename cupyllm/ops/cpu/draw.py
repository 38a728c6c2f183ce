"""The draw: of the tokens that a row's cutoff leaves, the one with the largest noise - distance.

The largest of such sums is a sample of the softmax (Gumbel, 1954), so that no token's probability is needed. The noise
is -log(-log(uniform)), with Philox4x32-10 (Salmon et al., 2011) for the uniforms; philox.py is the reference of both.

The words are those of the reference, bit by bit, but its logarithm may differ by a few units in the last place. Where
two sums are so close that this could decide, the answer is NOT_SURE.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.ops.cpu.bits import log
from cupyllm.ops.cpu.compile import part
from cupyllm.ops.cpu.cutoff import NOT_SURE
from cupyllm.ops.cpu.groups import GROUP, Row, distance_of, logit_of

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _WORD, _UNUSED_BITS = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(9)
_HALF, _STEP = np.float32(0.5), np.float32(2.0**-23)
_NOTHING, _MOST_NOISE = np.float32(-np.inf), np.float32(16.64)  # -log(-log(1 - 2**-24)), rounded up
_CLOSE = np.float32(1e-4)  # units in the last place of noise are below 2e-6


@part
def draw(row: Row, cutoff: Any, last_id: int, seed: Any, position: int) -> int:
    """The token of a row, among those of rank (cutoff, last_id) and before."""
    words, scores = np.empty(GROUP, np.uint32), np.empty(GROUP, np.float32)
    random_words(words, row.most_likely // GROUP, seed, position)
    least = noise_of(words[row.most_likely % GROUP])  # the score of the most likely token: the best has this or more
    best, second, best_id = _NOTHING, _NOTHING, 0
    for g in range(len(row.maxima)):
        if distance_of(row, row.maxima[g]) > min(cutoff, _MOST_NOISE - max(best, least) + _CLOSE):
            continue
        first, last = g * GROUP, min((g + 1) * GROUP, row.N)
        random_words(words, g, seed, position)
        for i in range(last - first):
            distance = distance_of(row, logit_of(row, first + i))
            is_kept = distance < cutoff or (distance == cutoff and first + i <= last_id)
            scores[i] = noise_of(words[i]) - distance if is_kept else _NOTHING
        for i in range(last - first):
            if scores[i] > best:
                best, second, best_id = scores[i], best, first + i
            elif scores[i] > second:
                second = scores[i]
    return best_id if best - second > _CLOSE else NOT_SURE


@part
def random_words(words: Any, group: int, seed: Any, position: int) -> None:
    """The random words of a group's ids at a position of a sequence: ids 4q to 4q + 3 have counter (q, position)."""
    key_0, key_1, first = seed & _LOW, seed >> _WORD, np.uint64(group * (GROUP // 4))
    for q in range(GROUP // 4):
        c0, c1, c2, c3 = first + np.uint64(q), np.uint64(position), np.uint64(0), np.uint64(0)
        k0, k1 = key_0, key_1
        for _ in range(10):
            product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
            c0, c1 = (product_1 >> _WORD) ^ c1 ^ k0, product_1 & _LOW
            c2, c3 = (product_0 >> _WORD) ^ c3 ^ k1, product_0 & _LOW
            k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
        words[4 * q], words[4 * q + 1], words[4 * q + 2], words[4 * q + 3] = c0, c1, c2, c3


@part
def noise_of(word: Any) -> Any:
    """Gumbel noise from the upper 23 bits of a random word; the half keeps the uniform off 0 and 1."""
    uniform = (np.float32(np.int32(word >> _UNUSED_BITS)) + _HALF) * _STEP
    return -log(-log(uniform))
