"""Logits as requests want them: penalised, moved, and -infinity where forbidden. The model's own stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.numerics import load_number
from cupyllm.ops.cpu.team import share_out
from cupyllm.sampling_batch import SamplingBatch

_WORD_BITS = 32
_ZERO, _INFINITY = np.float32(0), np.float32(np.inf)


def changes_of(sampling: SamplingBatch) -> tuple[np.ndarray, ...]:
    """What `adjust_logits` takes of a batch, in its order."""
    penalties = (sampling.repetition_penalty, sampling.penalty_starts, sampling.penalty_ids)
    offsets = (sampling.offset_starts, sampling.offset_ids, sampling.offsets)
    return (*penalties, *offsets, sampling.mask_rows, sampling.masks)


@kernel()
def adjust_logits(
    team: Any, out: Any, logits: Any, repetition_penalty: Any, penalty_starts: Any, penalty_ids: Any,
    offset_starts: Any, offset_ids: Any, offsets: Any, mask_rows: Any, masks: Any,
) -> None:  # fmt: skip
    """out (R, N) from the first N columns of logits (R, V). A row with NaN or +infinity has NaN or +infinity in `out`
    too, forbidden or not.
    """
    changes = (repetition_penalty, penalty_starts, penalty_ids, offset_starts, offset_ids, offsets, mask_rows, masks)
    share_out(team, adjust_row, len(out), (out, logits, *changes), ())


@part
def adjust_row(
    r: int, out: Any, logits: Any, repetition_penalty: Any, penalty_starts: Any, penalty_ids: Any,
    offset_starts: Any, offset_ids: Any, offsets: Any, mask_rows: Any, masks: Any,
) -> None:  # fmt: skip
    """The mask comes first here: penalties and offsets leave -infinity as it is."""
    copy_row(out, logits, r, mask_rows[r], masks)
    N = out.shape[1]
    for i in range(penalty_starts[r], penalty_starts[r + 1]):
        if penalty_ids[i] < N:  # an id of the prompt may have no token
            logit, penalty = out[r, penalty_ids[i]], repetition_penalty[r]
            out[r, penalty_ids[i]] = logit / penalty if logit > _ZERO else logit * penalty
    for i in range(offset_starts[r], offset_starts[r + 1]):
        if offset_ids[i] < N:
            out[r, offset_ids[i]] += offsets[i]


@part
def copy_row(out: Any, logits: Any, r: int, mask_row: int, masks: Any) -> None:
    """Copy a row, with -infinity for what its mask forbids."""
    N, offset = out.shape[1], r * logits.shape[1]
    if mask_row < 0:
        for token_id in range(N):
            out[r, token_id] = load_number(logits, offset + token_id)
        return
    for start in range(0, N, _WORD_BITS):
        word = np.int32(masks[mask_row, start // _WORD_BITS])
        for bit in range(min(_WORD_BITS, N - start)):
            forbidden = _ZERO if (word >> np.int32(bit)) & np.int32(1) else _INFINITY
            out[r, start + bit] = load_number(logits, offset + start + bit) - forbidden  # NaN from NaN and +infinity
