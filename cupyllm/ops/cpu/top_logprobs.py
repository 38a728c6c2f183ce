"""Log-probabilities by the model's own distribution: of one token of each row, and of its most likely ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.ops.cpu.bits import bits_of
from cupyllm.ops.cpu.compile import kernel, part
from cupyllm.ops.cpu.groups import GROUP, Row, index_row, logit_of, mass_of_row, ordered
from cupyllm.ops.cpu.team import share_out

_NAN, _ZERO, _ONE = np.float32(np.nan), np.float32(0), np.float32(1)
_ID_BITS, _LAST_ID = np.int64(32), np.int64(2**32 - 1)
_FIRST, _NO_RANK = np.int64(2**63 - 1), np.int64(-(2**63))


@kernel()
def find_logprobs(
    team: Any, logprobs: Any, top_ids: Any, top_logprobs: Any, logits: Any, N: int, token_ids: Any
) -> None:  # fmt: skip
    """logprobs (R,) of token_ids (R,), top_ids and top_logprobs (R, n) from the first N columns of logits (R, V).

    Rows whose token is -1 stay as they are; one with a NaN or nothing finite gets NaN.
    """
    share_out(team, row_logprobs, len(logits), (logprobs, top_ids, top_logprobs, logits, N, token_ids), ())


@part
def row_logprobs(r: int, logprobs: Any, top_ids: Any, top_logprobs: Any, logits: Any, N: int, token_ids: Any) -> None:
    """A tournament for the most likely ones: the best of the groups' best comes next, and only its group is read again
    (Knuth, "The art of computer programming", volume 3, 5.2.3, tree selection).
    """
    if token_ids[r] < 0:
        return
    row = index_row(logits, r, N, _ONE)
    if row.most_likely < 0:
        logprobs[r], top_logprobs[r, :] = _NAN, _NAN
        return
    log_sum = np.float64(row.largest) + np.log(mass_of_row(row))
    logprobs[r] = np.float64(logit_of(row, token_ids[r])) - log_sum
    ranks = np.empty(len(row.maxima), np.int64)  # of the best that is left in each group, or one just before it
    for g in range(len(ranks)):
        ranks[g] = rank_of(row.maxima[g], g * GROUP)
    taken = _FIRST
    for place in range(top_ids.shape[1]):
        best = np.argmax(ranks)
        taken = next_rank(row, best, taken)
        ranks[best] = next_rank(row, best, taken)
        token_id = _LAST_ID - (taken & _LAST_ID)
        top_ids[r, place], top_logprobs[r, place] = token_id, np.float64(logit_of(row, token_id)) - log_sum


@part
def rank_of(logit: Any, token_id: int) -> Any:
    """A number that is larger for a larger logit, and of equals for the smaller id. -0 and 0 are equal."""
    return (np.int64(ordered(bits_of(logit + _ZERO))) << _ID_BITS) + (_LAST_ID - token_id)


@part
def next_rank(row: Row, g: Any, taken: Any) -> Any:
    """The largest rank in a group that is below `taken`; below all ranks where there is none."""
    best = _NO_RANK
    for token_id in range(g * GROUP, min((g + 1) * GROUP, row.N)):
        rank = rank_of(logit_of(row, token_id), token_id)
        best = rank if best < rank < taken else best
    return best
