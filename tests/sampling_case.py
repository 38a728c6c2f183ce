"""Rows to sample: parameters, and the sequences they belong to."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupyllm.ops.reference import ReferenceOps
from cupyllm.row_sampling import RowSampling, count_width
from cupyllm.sampling import SamplingParams
from cupyllm.sampling_batch import fixed_parameters
from cupyllm.sequence import Sequence

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def row(seed: int = 0, token_ids: list[int] | None = None, *, num_prompt_tokens: int = 0, **params: Any) -> Sequence:
    """A sequence with these tokens whose next one is wanted; the end token is 0."""
    token_ids = token_ids or [1, 2, 3]
    params_of_row = SamplingParams(**(NEUTRAL | params))
    sequence = Sequence(0, token_ids, num_prompt_tokens, params_of_row, seed, 100, frozenset([0]))
    sequence.guide = None if params_of_row.guide is None else params_of_row.guide.start()
    return sequence


@st.composite
def penalised_rows(draw: st.DrawFn) -> list[Sequence]:
    """Up to four rows with penalties or without, of prompts and outputs in which some of 20 ids come often."""
    rows = []
    for seed in range(draw(st.integers(1, 4))):
        prompt, output = (draw(st.lists(st.integers(0, 19), min_size=1, max_size=12)) for _ in range(2))
        params = {
            "temperature": draw(st.sampled_from([0.0, 1.0])),
            "top_k": draw(st.sampled_from([0, 3])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.3, -0.1])),
            "frequency_penalty": draw(st.sampled_from([0.0, 0.7, -0.2])),
        }
        rows.append(row(seed, prompt + output, num_prompt_tokens=len(prompt), **params))
    return rows


def on_the_device(rows: list[Sequence], *, vocab_limit: int) -> RowSampling:
    """The same rows as those that stay on the device, counted by the reference op."""
    params, counts = [one.params for one in rows], np.full((len(rows), count_width(vocab_limit)), 77, np.uint32)
    ends = np.cumsum([one.num_tokens for one in rows]).tolist()
    jobs = [
        (number, 1, end - one.num_tokens, end - one.num_output_tokens, end)
        for number, (one, end) in enumerate(zip(rows, ends, strict=True))
    ]
    tokens = np.array([token for one in rows for token in one.token_ids], np.int32)
    ReferenceOps().count_tokens(counts, np.array(jobs, np.int32), tokens, vocab_limit=vocab_limit)
    return RowSampling(
        **fixed_parameters(params),
        seeds=np.array([one.seed for one in rows], np.uint64),
        positions=np.array([one.num_tokens for one in rows], np.int32),
        presence_penalty=np.array([p.presence_penalty for p in params]),
        frequency_penalty=np.array([p.frequency_penalty for p in params]),
        counts=counts,
        vocab_limit=vocab_limit,
    )
