"""The sampling parameters of decode rows that stay on the device, and the tokens that it counts there itself.

A penalty looks back at the prompt and the output. In a captured step the host does not know the last tokens yet, so the
device keeps, for each row with a penalty, how often every token has come.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.sampling_batch import SamplingBatch

IN_PROMPT, IN_OUTPUT = 1, 2  # what a token in the prompt, and each time a token in the output, adds to its count


@dataclass(frozen=True)
class RowSampling:
    """What R rows sample by. The penalties by count are float64 because that is how the host adds them up."""

    seeds: np.ndarray  # (R,) uint64
    positions: np.ndarray  # (R,) int32, the place of the token to be sampled
    temperature: np.ndarray  # (R,) float32; 0 is greedy
    top_k: np.ndarray  # (R,) int32; 0 is off
    top_p: np.ndarray  # (R,) float32; 1 is off
    min_p: np.ndarray  # (R,) float32; 0 is off
    repetition_penalty: np.ndarray  # (R,) float32; 1 is off
    presence_penalty: np.ndarray  # (R,) float64; 0 is off
    frequency_penalty: np.ndarray  # (R,) float64; 0 is off
    counts: np.ndarray  # (R, padded vocab_limit) uint32: see IN_PROMPT; of rows without a penalty they mean nothing
    vocab_limit: int  # ids from here on have no token and are never chosen


def count_width(vocab_limit: int) -> int:
    """The columns of `counts`: rows start at multiples of 16 bytes."""
    return -(-vocab_limit // 4) * 4


def sampling_batch(rows: RowSampling) -> SamplingBatch:
    """The same as the sampling op takes it, where the arrays are NumPy's."""
    penalised, moved, offsets = [], [], []
    for r, counts in enumerate(rows.counts[:, : rows.vocab_limit]):
        presence, frequency = rows.presence_penalty[r], rows.frequency_penalty[r]
        penalised.append(np.flatnonzero(counts) if rows.repetition_penalty[r] != 1 else np.empty(0, np.int64))
        moved.append(np.flatnonzero(counts >= IN_OUTPUT) if presence or frequency else np.empty(0, np.int64))
        offsets.append(-(presence + frequency * (counts[moved[-1]] // IN_OUTPUT)))
    num_rows = len(rows.counts)
    return SamplingBatch(
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        repetition_penalty=rows.repetition_penalty,
        penalty_starts=np.cumsum([0, *map(len, penalised)], dtype=np.int32),
        penalty_ids=np.concatenate(penalised).astype(np.int32),
        offset_starts=np.cumsum([0, *map(len, moved)], dtype=np.int32),
        offset_ids=np.concatenate(moved).astype(np.int32),
        offsets=np.concatenate(offsets).astype(np.float32),
        mask_rows=np.full(num_rows, -1, np.int32),
        masks=np.empty((0, -(-rows.vocab_limit // 32)), np.uint32),
        seeds=rows.seeds,
        positions=rows.positions,
        num_logprobs=-1,
        vocab_limit=rows.vocab_limit,
    )
