"""Counter-based random numbers: the same uniform for the same (seed, position, token id), on any device, in any batch.

Philox4x32-10 turns a 128-bit counter and a 64-bit key into four 32-bit words by ten rounds of multiply and
exclusive-or; it keeps no state, so a sequence that is preempted, batched differently or moved to a GPU draws the
same numbers. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds over many counters: (N, 4) uint32 words and two 32-bit key words -> (N, 4) uint32."""
    c0, c1, c2, c3 = (counter[:, word].astype(np.uint64) for word in range(4))
    k0, k1 = key
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = (product_1 >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c1 = product_1 & _LOW
        c2 = (product_0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c3 = product_0 & _LOW
        k0 = (k0 + _WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def token_uniforms(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """One uniform in (0, 1) for each token id that may be drawn at `position` of a sequence: (N,) float32.

    Token ids 4g to 4g+3 share the counter (g, position, 0, 0) and take its words in order, so that a GPU thread which
    reads four logits at once needs one Philox call. 23 bits and a half make every value exact in float32 and never
    0 or 1.
    """
    groups, group_of = np.unique(token_ids >> 2, return_inverse=True)
    counter = np.zeros((len(groups), 4), np.uint32)
    counter[:, 0] = groups
    counter[:, 1] = position
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))[group_of, token_ids & 3]
    uniforms: np.ndarray = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return uniforms
