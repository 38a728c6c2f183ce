"""A plan as flat arrays: what one forward pass reads. All index arrays are int32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.scheduler import Plan


@dataclass(frozen=True)
class Batch:
    """T tokens of S sequences, the decode rows first.

    Sequence s owns the rows query_starts[s]:query_starts[s + 1]; its keys and values, those of this step included,
    are the first context_lens[s] slots of its pages. The whole numbers are known on the host, so that launches need
    no copy back.
    """

    token_ids: np.ndarray  # (T,)
    positions: np.ndarray  # (T,) place of each token in its sequence
    slots: np.ndarray  # (T,) where its key and value go: page * page_size + offset
    query_starts: np.ndarray  # (S + 1,)
    context_lens: np.ndarray  # (S,)
    page_tables: np.ndarray  # (S, most pages of a sequence), unused entries -1
    logit_rows: np.ndarray  # (R,) rows of T whose next token is wanted
    num_decodes: int  # the first sequences, with one row each
    max_query_len: int
    max_context_len: int


def build_batch(plan: Plan, page_size: int) -> Batch:
    """Lay a plan out as arrays; the logits of every chunk that reaches its sequence's end are wanted."""
    chunks = plan.chunks
    lengths = np.array([chunk.length for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    pages_used = [-(-(chunk.start + chunk.length) // page_size) for chunk in chunks]
    page_tables = np.full((len(chunks), max(pages_used)), -1, np.int32)
    for row, (chunk, used) in enumerate(zip(chunks, pages_used, strict=True)):
        page_tables[row, :used] = chunk.sequence.page_table[:used]

    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]
    sequence_of = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)  # (T,)
    positions = np.arange(query_starts[-1], dtype=np.int32) - np.repeat(query_starts[:-1] - starts, lengths)
    slots = page_tables[sequence_of, positions // page_size] * page_size + positions % page_size
    ends = np.array([chunk.reaches_end for chunk in chunks])
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lens=starts + lengths,
        page_tables=page_tables,
        logit_rows=query_starts[1:][ends] - 1,
        num_decodes=plan.num_decodes,
        max_query_len=int(lengths.max()),
        max_context_len=int((starts + lengths).max()),
    )
