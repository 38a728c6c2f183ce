"""A plan as flat arrays: what one forward pass reads. All index arrays are int32."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupyllm.plan import Plan, PlannedChunk
from cupyllm.sequence import Sequence

ONE = np.int32(1)


class Batch(NamedTuple):
    """T tokens of S sequences, the decode rows first.

    Sequence s owns the rows query_starts[s]:query_starts[s + 1]; its keys and values, those of this step included, are
    the first context_lens[s] slots of its pages. The whole numbers are known on the host, so that launches need no copy
    back.
    """

    token_ids: np.ndarray  # (T,)
    positions: np.ndarray  # (T,) place of each token in its sequence
    slots: np.ndarray  # (T,) where its key and value go: page * page_size + offset
    query_starts: np.ndarray  # (S + 1,)
    context_lens: np.ndarray  # (S,)
    page_tables: np.ndarray  # (S, at least the most pages of a sequence), unused entries -1
    logit_rows: np.ndarray  # (R,) rows of T whose next token is wanted
    num_decodes: int  # the first sequences, with one row each
    max_query_len: int
    max_context_len: int


class BatchBuilder:
    """Lays plans out as arrays. Decode rows are kept from step to step: who stays in a row is only moved on.

    The arrays of a batch are valid until the next one is built.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._rows: list[Sequence] = []  # the decode rows of the last batch
        self._positions = np.zeros(0, np.int32)  # these three have spare rows, and the page tables spare columns
        self._slots = np.zeros(0, np.int32)
        self._page_tables = np.full((0, 0), -1, np.int32)
        self._starts = np.zeros(1, np.int32)  # 0, 1, 2, ...
        self._longest = 0  # most tokens that a row has in the cache

    @property
    def positions(self) -> np.ndarray:
        """(S,) int32: place of the token that each decode row runs."""
        return self._positions[: len(self._rows)]

    @property
    def page_tables(self) -> np.ndarray:
        """(S, at least the most pages of a row) int32; unused entries are -1."""
        return self._page_tables[: len(self._rows)]

    @property
    def max_context_len(self) -> int:
        """Most tokens of a decode row, the one that it runs included."""
        return self._longest

    def build(self, plan: Plan) -> Batch:
        """The arrays of one step; the logits of every sequence whose last known token runs are wanted."""
        self.follow(plan)
        count = len(plan.decodes)
        positions = self._positions[:count]
        decodes = Batch(
            token_ids=np.array([sequence.token_ids[-1] for sequence in plan.decodes], np.int32),
            positions=positions,
            slots=self._slots[:count],
            query_starts=self._starts[: count + 1],
            context_lens=positions + ONE,
            page_tables=self._page_tables[:count],
            logit_rows=self._starts[:count],
            num_decodes=count,
            max_query_len=1,
            max_context_len=self._longest if count else 0,
        )
        return add_prompts(decodes, plan.prompts, self._page_size) if plan.prompts else decodes

    def follow(self, plan: Plan) -> None:
        """Bring the decode rows up to date, which has to be done for every plan; `build` does it, too."""
        rows, before = plan.decodes, self._rows
        self._positions[: len(before)] += ONE
        self._slots[: len(before)] += ONE
        if rows == before and not plan.page_copies:
            self._longest += 1
            self._grow(plan)
            for sequence in plan.entering:
                if sequence.row is not None:  # else preempted by this very plan
                    self._slots[sequence.row] = self._slot(sequence, sequence.num_computed)
            return
        self._ensure_room(len(rows), max((len(sequence.page_table) for sequence in rows), default=0))
        for row, sequence in enumerate(rows):
            stays = row < len(before) and before[row] is sequence and not plan.page_copies
            if not stays or self._positions[row] % self._page_size == 0:
                self._fill_row(row, sequence)
        self._grow(plan)
        self._rows = rows
        self._longest = max((sequence.num_tokens for sequence in rows), default=0)

    def _grow(self, plan: Plan) -> None:
        for sequence in plan.growing:
            if sequence.row is not None:
                page_table = sequence.page_table
                self._ensure_room(0, len(page_table))
                self._page_tables[sequence.row, len(page_table) - 1] = page_table[-1]

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.page_table[position // self._page_size] * self._page_size + position % self._page_size

    def _fill_row(self, row: int, sequence: Sequence) -> None:
        page_table = sequence.page_table
        self._positions[row] = sequence.num_computed
        self._slots[row] = self._slot(sequence, sequence.num_computed)
        self._page_tables[row, : len(page_table)] = page_table
        self._page_tables[row, len(page_table) :] = -1

    def _ensure_room(self, num_rows: int, num_pages: int) -> None:
        have_rows, have_pages = self._page_tables.shape
        if num_rows <= have_rows and num_pages <= have_pages:
            return
        shape = (max(have_rows, 2 * num_rows), max(have_pages, 2 * num_pages))
        self._positions = _enlarged(self._positions, shape[:1], 0)
        self._slots = _enlarged(self._slots, shape[:1], 0)
        self._page_tables = _enlarged(self._page_tables, shape, -1)
        self._starts = np.arange(shape[0] + 1, dtype=np.int32)


def add_prompts(decodes: Batch, chunks: list[PlannedChunk], page_size: int) -> Batch:
    """A batch of decode rows, which may be empty, with prompt chunks behind them."""
    lengths = np.array([chunk.length for chunk in chunks], np.int32)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    query_ends = np.cumsum(lengths, dtype=np.int32) + np.int32(decodes.num_decodes)
    pages_used = [-(-(chunk.start + chunk.length) // page_size) for chunk in chunks]
    width = max(decodes.page_tables.shape[1], *pages_used)
    page_tables = np.full((decodes.num_decodes + len(chunks), width), -1, np.int32)
    page_tables[: decodes.num_decodes, : decodes.page_tables.shape[1]] = decodes.page_tables
    token_ids: list[int] = []
    for row, (chunk, used) in enumerate(zip(chunks, pages_used, strict=True), start=decodes.num_decodes):
        page_tables[row, :used] = chunk.sequence.page_table[:used]
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.length]

    place = np.arange(len(token_ids), dtype=np.int32)  # (tokens of prompts,)
    chunk_of = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
    positions = place - (query_ends - lengths - np.int32(decodes.num_decodes) - starts)[chunk_of]
    pages = page_tables[decodes.num_decodes + chunk_of, positions // page_size]
    ended = np.array([chunk.reaches_end for chunk in chunks])
    return Batch(
        token_ids=np.concatenate([decodes.token_ids, np.array(token_ids, np.int32)]),
        positions=np.concatenate([decodes.positions, positions]),
        slots=np.concatenate([decodes.slots, pages * page_size + positions % page_size]),
        query_starts=np.concatenate([decodes.query_starts, query_ends]),
        context_lens=np.concatenate([decodes.context_lens, starts + lengths]),
        page_tables=page_tables,
        logit_rows=np.concatenate([decodes.logit_rows, query_ends[ended] - ONE]),
        num_decodes=decodes.num_decodes,
        max_query_len=int(lengths.max()),
        max_context_len=max(decodes.max_context_len, int((starts + lengths).max())),
    )


def _enlarged(array: np.ndarray, shape: tuple[int, ...], fill: int) -> np.ndarray:
    """The same values in a larger array, the rest filled."""
    larger = np.full(shape, fill, array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
