"""The sampling op: temperature, top-k, top-p, min-p and the draw, over whole vocabularies.

A row's token is that of the reference, always. Where rounding could make these kernels choose another one, they say so,
and the reference is asked for this row: it happens once in some ten thousand tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.ops.cpu.adjust import adjust_logits, changes_of
from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.cutoff import NOT_SURE, cutoff_of
from cupyllm.ops.cpu.draw import draw
from cupyllm.ops.cpu.groups import index_row
from cupyllm.ops.cpu.team import Team, share_out
from cupyllm.ops.cpu.top_logprobs import find_logprobs
from cupyllm.ops.sample_reference import sample_row
from cupyllm.sampling_batch import GREEDY_BELOW, SamplingBatch, TopLogprobs


def choose(team: Team, logits: np.ndarray, sampling: SamplingBatch) -> np.ndarray:
    """The token ids of ReferenceOps.sample: (R, V) -> (R,) int32."""
    N = min(logits.shape[1], sampling.vocab_limit)
    token_ids, changed = np.empty(len(logits), np.int32), logits
    if sampling.changes_logits:
        changed = np.empty((len(logits), N), np.float32)
        team.run(adjust_logits, changed, logits, *changes_of(sampling))
    temperature = np.where(sampling.temperature < GREEDY_BELOW, np.float32(0), sampling.temperature)
    filters = (sampling.top_k, sampling.top_p, _distances(sampling.min_p))
    team.run(draw_rows, token_ids, changed, N, temperature, *filters, sampling.seeds, sampling.positions)
    for r in np.flatnonzero(token_ids == NOT_SURE).tolist():
        token_ids[r] = sample_row(logits[r, :N], sampling, r)
    return token_ids


def token_logprobs(team: Team, logits: np.ndarray, token_ids: np.ndarray, count: int, N: int) -> TopLogprobs:
    """ReferenceOps.token_logprobs over the first N columns of logits (R, V)."""
    R, num_top = len(logits), min(max(count, 0), N)
    logprobs = np.zeros(R if count >= 0 else 0, np.float32)
    top_ids, top_logprobs = np.zeros((R, num_top), np.int32), np.zeros((R, num_top), np.float32)
    if count >= 0:
        team.run(find_logprobs, logprobs, top_ids, top_logprobs, logits, N, token_ids)
    return TopLogprobs(logprobs, top_ids, top_logprobs)


def _distances(min_p: np.ndarray) -> np.ndarray:
    """The largest distances, -log(probability / largest probability), that min-p keeps: (R,) float32."""
    with np.errstate(divide="ignore"):
        exact = -np.log(min_p.astype(np.float64))
    rounded = exact.astype(np.float32)
    return np.where(rounded > exact, np.nextafter(rounded, np.float32(-np.inf)), rounded)


@kernel()
def draw_rows(
    team: Any, token_ids: Any, logits: Any, N: int, temperature: Any, top_k: Any, top_p: Any, min_p_distance: Any,
    seeds: Any, positions: Any,
) -> None:  # fmt: skip
    """token_ids (R,) from the first N columns of logits (R, V); a temperature of 0 is greedy. -1: the row has a NaN or
    nothing finite; NOT_SURE: the reference may choose another token.
    """
    filters, numbers = (temperature, top_k, top_p, min_p_distance), (seeds, positions)
    share_out(team, draw_row, len(logits), (token_ids, logits, N, *filters, *numbers), ())


@part
def draw_row(
    r: int, token_ids: Any, logits: Any, N: int, temperature: Any, top_k: Any, top_p: Any, min_p_distance: Any,
    seeds: Any, positions: Any,
) -> None:  # fmt: skip
    """One row."""
    row = index_row(logits, r, N, temperature[r])
    token_ids[r] = row.most_likely
    if row.most_likely >= 0 and temperature[r] > 0:
        distance, last_id = cutoff_of(row, top_k[r], top_p[r], min_p_distance[r])
        token_ids[r] = NOT_SURE
        if last_id != NOT_SURE:
            token_ids[r] = draw(row, distance, last_id, seeds[r], positions[r])
