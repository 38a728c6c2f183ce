"""A row to sample: parameters, and the sequence they belong to."""

from __future__ import annotations

from typing import Any

from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def row(seed: int = 0, token_ids: list[int] | None = None, *, num_prompt_tokens: int = 0, **params: Any) -> Sequence:
    """A sequence with these tokens whose next one is wanted; the end token is 0."""
    token_ids = token_ids or [1, 2, 3]
    params_of_row = SamplingParams(**(NEUTRAL | params))
    sequence = Sequence(0, token_ids, num_prompt_tokens, params_of_row, seed, 100, frozenset([0]))
    sequence.guide = None if params_of_row.guide is None else params_of_row.guide.start()
    return sequence
