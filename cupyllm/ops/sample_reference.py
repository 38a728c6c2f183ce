"""Choosing one token from one row of logits: penalties, offsets and mask, then temperature, top-k, top-p, min-p, draw.

The draw is the Gumbel-max trick: the largest of logit + Gumbel noise is a sample of the softmax, so no normalised
probabilities and no running sum are needed, and every device that has the same noise picks the same token.
Source: Gumbel, 1954; Maddison et al., "A* sampling", 2014.
"""

from __future__ import annotations

import numpy as np

from cupyllm.philox import token_uniforms
from cupyllm.sampling_batch import GREEDY_BELOW, SamplingBatch


def sample_row(row: np.ndarray, sampling: SamplingBatch, r: int) -> int:
    """The token for row r of a batch, or -1 when it may choose none: row is (V,) float32, finite somewhere and without
    NaN.
    """
    row = adjusted(row, sampling, r)
    most_likely = int(row.argmax())
    if not np.isfinite(row[most_likely]):
        return -1
    temperature = sampling.temperature[r]
    if temperature < GREEDY_BELOW:
        return most_likely
    scaled = (row - row[most_likely]) / temperature  # the largest is 0, so nothing overflows
    ids = candidates(scaled, int(sampling.top_k[r]), float(sampling.top_p[r]), float(sampling.min_p[r]))
    uniforms = token_uniforms(int(sampling.seeds[r]), int(sampling.positions[r]), ids)
    return int(ids[np.argmax(scaled[ids] - np.log(-np.log(uniforms)))])


def adjusted(row: np.ndarray, sampling: SamplingBatch, r: int) -> np.ndarray:
    """The logits of row r as the request wants them, (V,) float32: penalised, moved, and -infinity where forbidden."""
    row = row.copy()
    penalised = sampling.penalty_ids[sampling.penalty_starts[r] : sampling.penalty_starts[r + 1]]
    penalised = penalised[penalised < len(row)]  # an id of the prompt may have no token
    row[penalised] = penalise(row[penalised], sampling.repetition_penalty[r])
    moved = slice(sampling.offset_starts[r], sampling.offset_starts[r + 1])
    ids, offsets = sampling.offset_ids[moved], sampling.offsets[moved]
    row[ids[ids < len(row)]] += offsets[ids < len(row)]
    if sampling.mask_rows[r] >= 0:
        words = sampling.masks[sampling.mask_rows[r]]
        allowed = np.unpackbits(words.astype("<u4").view(np.uint8), count=len(row), bitorder="little")
        row[allowed == 0] = -np.inf
    return row


def penalise(logits: np.ndarray, penalty: np.float32) -> np.ndarray:
    """Repetition penalty: divide positive logits, multiply negative ones, so that both become less likely."""
    return np.where(logits > 0, logits / penalty, logits * penalty)


def candidates(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The ids that may be drawn, in order of id; never empty. `scaled` are logits whose largest is 0.

    Each filter works on what the one before it left, renormalised, as in transformers. Ties at the edge of top-k and
    top-p go to the smaller id.
    """
    ids = np.arange(len(scaled))
    if 0 < top_k < len(ids):
        ids = largest_ids(scaled, top_k)
    if top_p < 1.0:
        weights = np.exp(scaled[ids], dtype=np.float64)
        weights /= weights.sum()
        # Tokens rarer than this cannot reach 1 - top_p all together, so they are outside and need no sorting.
        likely = np.flatnonzero(weights >= (1.0 - top_p) / len(ids))
        order = likely[np.argsort(-scaled[ids[likely]], kind="stable")]
        before = np.cumsum(weights[order]) - weights[order]  # probability of all more likely tokens
        before[0] = -1.0  # the first stays, also where top_p is so small that it is 0 in float32
        ids = np.sort(ids[order[before < top_p]])
    if min_p > 0.0:
        ids = ids[scaled[ids] >= np.log(min_p)]
    return ids


def top_logprobs(row: np.ndarray, token_id: int, count: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Log-probability of `token_id`, and the `count` most likely ids with theirs, by the model's own distribution.

    NaN, and ids of 0, where the row has NaN or nothing finite.
    """
    largest = float(row.max())
    if not np.isfinite(largest):
        return np.nan, np.zeros(count, np.int32), np.full(count, np.nan, np.float32)
    log_sum = largest + float(np.log(np.exp(row - row.max(), dtype=np.float64).sum()))
    ids = largest_ids(row, count)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return float(row[token_id]) - log_sum, ids.astype(np.int32), (row[ids] - log_sum).astype(np.float32)


def largest_ids(values: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest values, in order of id; of equal values at the edge the smaller ids."""
    if count <= 0:
        return np.empty(0, np.int64)
    edge = np.partition(values, -count)[-count]
    above, tied = np.flatnonzero(values > edge), np.flatnonzero(values == edge)
    return np.sort(np.concatenate([above, tied[: count - len(above)]]))
