"""Rows that stay on the device: counts of tokens change their logits as the host's lists do, and they draw the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyllm.ops.reference import ReferenceOps
from cupyllm.ops.sample_reference import adjusted
from cupyllm.row_sampling import sampling_batch
from cupyllm.sampling_batch import build_sampling_batch
from cupyllm.sequence import Sequence
from tests.sampling_case import on_the_device, penalised_rows

VOCAB_LIMIT = 18  # ids 18 and 19, which come in the rows, have no token


@settings(max_examples=80, deadline=None, derandomize=True)
@given(penalised_rows(), st.integers(0, 99))
def test_counts_change_logits_to_the_bits_that_the_lists_of_the_host_do(rows: list[Sequence], seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((len(rows), 20), np.float32) * 3
    by_lists = build_sampling_batch(rows, vocab_limit=VOCAB_LIMIT)
    there = on_the_device(rows, vocab_limit=VOCAB_LIMIT)
    by_counts = sampling_batch(there)
    for r in range(len(rows)):
        ours, theirs = (adjusted(logits[r, :VOCAB_LIMIT], batch, r) for batch in (by_counts, by_lists))
        np.testing.assert_array_equal(ours.view(np.int32), theirs.view(np.int32))
    out = np.full(len(rows), -9, np.int32)
    ReferenceOps().sample_rows(logits.copy(), there, all_plain=False, out=out)
    np.testing.assert_array_equal(out, ReferenceOps().sample(logits, by_lists).token_ids)
