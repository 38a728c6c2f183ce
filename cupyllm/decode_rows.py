"""The decode rows on the device: what a step reads of every running sequence, kept there from step to step.

A step moves the rows on by itself (ReferenceOps.advance_rows), so the host sends only what it alone knows: the page
that a row enters, and a sequence that joins, leaves or moves to another row. All of it lies in one array of words, and
one upload with one launch changes any of them. The host has a copy, so as to send nothing that is there already.

Beside the words lie the counts of tokens that penalties look at (row_sampling.py). A step counts the token that it
runs. The host sends the others: all tokens of a row that joins, and those that a row got in another way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cupyllm.batch import Batch, BatchBuilder
from cupyllm.device import Array, Device
from cupyllm.ops.reference import ReferenceOps
from cupyllm.plan import Plan
from cupyllm.row_sampling import RowSampling, count_width
from cupyllm.sampling_batch import GREEDY_BELOW, fixed_parameters
from cupyllm.sequence import PENDING, Sequence
from cupyllm.unread import Unread

# What a row has that is not in use: a token that exists, no slot to write to, and no context.
UNUSED = {"token_ids": 0, "positions": 0, "slots": -1, "context_lens": 0}
# 8-byte numbers, two words each, lie first, because they must be aligned.
LONG_FIELDS = {"seeds": np.uint64, "presence_penalty": np.float64, "frequency_penalty": np.float64}
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty")
SAMPLING_FIELDS = (*LONG_FIELDS, *FLOAT_FIELDS, "top_k")


class RowFields(NamedTuple):
    """The parts of the array of words, each as what it holds of R rows; in the order in which they lie there."""

    seeds: Array  # (R,) uint64
    presence_penalty: Array  # (R,) float64
    frequency_penalty: Array  # (R,) float64
    token_ids: Array  # (R,) int32
    positions: Array  # (R,) int32
    slots: Array  # (R,) int32
    context_lens: Array  # (R,) int32: tokens in the cache, 0 for a row that is not in use
    sampled: Array  # (R,) int32: what a step sampled, and the next one runs
    temperature: Array  # (R,) float32
    top_k: Array  # (R,) int32
    top_p: Array  # (R,) float32
    min_p: Array  # (R,) float32
    repetition_penalty: Array  # (R,) float32
    page_tables: Array  # (R, max_pages) int32; entries past the context may be anything


class RowLayout(NamedTuple):
    """Where the fields lie in the array of words."""

    max_rows: int
    max_pages: int

    def starts(self) -> dict[str, int]:
        """The first word of each field, and under "end" how many words there are."""
        sizes = dict.fromkeys(RowFields._fields, self.max_rows)
        sizes |= dict.fromkeys(LONG_FIELDS, 2 * self.max_rows)
        sizes["page_tables"] = self.max_rows * self.max_pages
        return dict(zip((*sizes, "end"), np.cumsum([0, *sizes.values()]).tolist(), strict=True))

    def fields(self, words: Array) -> RowFields:
        """Views of an array of words."""
        starts = list(self.starts().values())
        parts = (words[start:end] for start, end in pairwise(starts))
        fields = RowFields(*parts)
        dtypes = {**LONG_FIELDS, **dict.fromkeys(FLOAT_FIELDS, np.float32)}
        views = {name: getattr(fields, name).view(dtype) for name, dtype in dtypes.items()}
        tables = fields.page_tables.reshape(self.max_rows, self.max_pages)
        return fields._replace(page_tables=tables, **views)

    def unused_words(self) -> np.ndarray:
        """The words of rows that are not in use."""
        words = np.zeros(self.starts()["end"], np.int32)
        fields = self.fields(words)
        for name, value in UNUSED.items():
            getattr(fields, name)[:] = value
        return words


class RowArrays:
    """Rows on the device, none of them in use at first, as what the ops read."""

    def __init__(self, layout: RowLayout, device: Device, *, counts: Array, vocab_limit: int) -> None:
        self.words = device.upload(layout.unused_words())
        self.fields = layout.fields(self.words)
        self.counts = counts  # (max_rows, padded vocab_limit) uint32
        self._row_numbers = device.upload(np.arange(layout.max_rows + 1, dtype=np.int32))
        self._vocab_limit = vocab_limit

    def batch(self, rows: int, max_context_len: int) -> Batch:
        """The first rows, as a step's batch."""
        fields = RowFields(*(field[:rows] for field in self.fields))
        return Batch(
            token_ids=fields.token_ids,
            positions=fields.positions,
            slots=fields.slots,
            query_starts=self._row_numbers[: rows + 1],
            context_lens=fields.context_lens,
            page_tables=fields.page_tables,
            logit_rows=self._row_numbers[:rows],
            num_decodes=rows,
            max_query_len=1,
            max_context_len=max_context_len,
        )

    def sampling(self, rows: int) -> RowSampling:
        """The first rows' sampling parameters."""
        fields = {name: getattr(self.fields, name)[:rows] for name in SAMPLING_FIELDS}
        # The place of the token to be sampled, which is the counter of its random numbers, is behind the context.
        positions = self.fields.context_lens[:rows]
        return RowSampling(**fields, positions=positions, counts=self.counts[:rows], vocab_limit=self._vocab_limit)


class DecodeRows:
    """Up to `layout.max_rows` sequences, each in the row that the scheduler gave it.

    A step is: `follow`, which makes the device's rows those of the plan, as they are before the step; the step itself,
    which moves them on and samples; `moved_on`, which says so; and `put_tokens`, where it has not sampled. `leave` says
    that tokens were run in another way.
    """

    def __init__(
        self, ops: ReferenceOps, device: Device, layout: RowLayout, *, page_size: int, vocab_limit: int
    ) -> None:
        counts = device.zeros((layout.max_rows, count_width(vocab_limit)), "float32").view(np.uint32)
        self.arrays = RowArrays(layout, device, counts=counts, vocab_limit=vocab_limit)
        self.all_plain = True  # whether every row in use takes the most likely token of its logits as they are
        self._ops = ops
        self._device = device
        self._layout = layout
        self._starts = layout.starts()
        self._page_size = page_size
        self._vocab_limit = vocab_limit
        self._words = layout.unused_words()  # the device's, but for what steps write
        self._fields = layout.fields(self._words)
        self._sequences: list[Sequence] = []
        self._is_counted = np.zeros(layout.max_rows, bool)  # rows whose counts hold the device's context
        self._places_of_sampled = device.upload(np.arange(layout.max_rows, dtype=np.int32) + self._starts["sampled"])
        self._has_tokens = False  # whether `sampled` holds the next token of all these sequences
        self._num_steps = 0  # that moved the rows on since the last change of sequences

    @property
    def sampled(self) -> Array:
        """What was sampled last for each row in use: (S,) int32 on the device."""
        return self.arrays.fields.sampled[: len(self._sequences)]

    def follow(self, plan: Plan, batches: BatchBuilder, unread: Unread | None) -> None:
        """Send what has changed. A token that the host does not know is taken over from `unread`, on the device."""
        if self._has_tokens and plan.decodes == self._sequences:
            if plan.growing:
                self._grow(plan.growing)
        else:
            self._place(plan.decodes, batches, unread)

    def moved_on(self, *, has_sampled: bool) -> None:
        """A step ran on the device's rows; without `has_sampled`, `put_tokens` follows."""
        self._num_steps += 1
        self._has_tokens = has_sampled

    def put_tokens(self, token_ids: Array) -> None:
        """Take over the tokens of all rows in use, which were sampled elsewhere: (S,) int32 on the device."""
        self._ops.update_rows(self.arrays.words, self._places_of_sampled[: len(token_ids)], token_ids)
        self._has_tokens = True

    def leave(self) -> None:
        """Tokens of the rows were run without the device's rows knowing."""
        self._has_tokens = False

    def lose_track(self) -> None:
        """A step failed: nobody knows whether it has moved the device's rows on."""
        self._has_tokens = False
        self._num_steps = 0
        self._fields.context_lens[: len(self._sequences)] = -1  # unlike any length, so that all are sent again
        self._is_counted[:] = False

    def _grow(self, growing: list[Sequence]) -> None:
        """Send the last page of each of these rows."""
        start, max_pages = self._starts["page_tables"], self._layout.max_pages
        # Who has no row was preempted on the way here; then the rows have changed, and this is not called.
        rows = [sequence.row for sequence in growing if sequence.row is not None]
        lasts = [len(sequence.page_table) - 1 for sequence in growing]
        places = [start + row * max_pages + last for row, last in zip(rows, lasts, strict=True)]
        self._send(_Changes([places], [[sequence.page_table[-1] for sequence in growing]]))

    def _place(self, sequences: list[Sequence], batches: BatchBuilder, unread: Unread | None) -> None:
        """Bring every row up to date: who is in it, how long its context is, its pages, and its next token."""
        before, had_tokens = self._sequences, self._has_tokens
        self._has_tokens = False  # until all has been sent
        self._fields.context_lens[: len(before)] += self._num_steps
        self._num_steps = 0
        joined = [row for row, sequence in enumerate(sequences) if row >= len(before) or before[row] is not sequence]
        pending, changes = self._next_tokens(sequences, joined if had_tokens else range(len(sequences)))
        tokens = self._pending_tokens(pending, sequences, unread) if pending else None
        self._add_sampling(changes, sequences, joined)
        self._count_tokens(sequences, joined)
        self._add_contexts(changes, batches)
        for row in range(len(sequences), len(before)):
            changes.add([self._starts[name] + row for name in UNUSED], list(UNUSED.values()))
        self._send(changes)
        if tokens is not None:
            self._ops.update_rows(self.arrays.words, *tokens)
        self._sequences = sequences
        is_greedy = self._fields.temperature[: len(sequences)] < GREEDY_BELOW
        self.all_plain = bool((is_greedy & ~self._is_counted[: len(sequences)]).all())

    def _next_tokens(self, sequences: list[Sequence], rows: Seq[int]) -> tuple[list[int], _Changes]:
        """The rows whose token the host does not know, and the tokens of the others as changes."""
        tokens = [sequences[row].token_ids[-1] for row in rows]
        known = [(row, token) for row, token in zip(rows, tokens, strict=True) if token != PENDING]
        pending = [row for row, token in zip(rows, tokens, strict=True) if token == PENDING]
        return pending, _Changes([[self._starts["sampled"] + row for row, _ in known]], [[token for _, token in known]])

    def _pending_tokens(self, rows: list[int], sequences: list[Sequence], unread: Unread | None) -> tuple[Array, Array]:
        """Places and values of tokens that only the device knows."""
        assert unread is not None
        assert unread.sampled is not None
        places = {sequence.id: place for place, sequence in enumerate(unread.sequences)}
        sources = [places[sequences[row].id] for row in rows]
        targets = [self._starts["sampled"] + row for row in rows]
        sent = self._device.upload(np.array([sources, targets], np.int32))
        # Into an array of its own first: rows may have changed places with each other.
        return sent[1], self._ops.fill_tokens(sent[0], unread.sampled.token_ids, sent[0])

    def _add_sampling(self, changes: _Changes, sequences: list[Sequence], joined: list[int]) -> None:
        """The sampling parameters of rows whose sequence is another one."""
        if not joined:
            return
        params = [sequences[row].params for row in joined]
        parameters = {
            **fixed_parameters(params),
            "seeds": np.array([sequences[row].seed for row in joined], np.uint64),
            "presence_penalty": np.array([p.presence_penalty for p in params], np.float64),
            "frequency_penalty": np.array([p.frequency_penalty for p in params], np.float64),
        }
        for name, values in parameters.items():
            words = values.view(np.int32).reshape(len(joined), -1)
            places = np.array(joined)[:, None] * words.shape[1] + np.arange(words.shape[1])
            self._add_if_new(changes, name, places.reshape(-1), words.reshape(-1))

    def _count_tokens(self, sequences: list[Sequence], joined: list[int]) -> None:
        """Let the device count what penalties look at and it has not counted: all but the token that the step runs."""
        self._is_counted[joined] = False
        jobs: list[int] = []
        tokens: list[int] = []
        for row, sequence in enumerate(sequences):
            if not sequence.params.penalises:
                continue
            counted = int(self._fields.context_lens[row]) if self._is_counted[row] else 0
            first, num_outputs = len(tokens), sequence.num_output_tokens - 1
            tokens += sequence.token_ids[counted:-1]
            if len(tokens) > first:
                output = max(len(tokens) - num_outputs, first)
                jobs += [row, int(not self._is_counted[row]), first, output, len(tokens)]
            self._is_counted[row] = True
        if jobs:
            sent = self._device.upload(np.array(jobs + tokens, np.int32))
            parts = sent[: len(jobs)].reshape(-1, 5), sent[len(jobs) :]
            self._ops.count_tokens(self.arrays.counts, *parts, vocab_limit=self._vocab_limit)

    def _add_contexts(self, changes: _Changes, batches: BatchBuilder) -> None:
        """Length and pages of every row's context, as they are before the step."""
        positions = batches.positions
        self._add_if_new(changes, "context_lens", np.arange(len(positions)), positions)
        # Up to the page behind that of the longest context, which may be there early.
        width = min(int(positions.max()) // self._page_size + 2, batches.page_tables.shape[1], self._layout.max_pages)
        wanted = batches.page_tables[:, :width]
        rows, columns = np.nonzero((wanted >= 0) & (wanted != self._fields.page_tables[: len(positions), :width]))
        start = self._starts["page_tables"]
        changes.add(start + rows * self._layout.max_pages + columns, wanted[rows, columns])

    def _add_if_new(self, changes: _Changes, name: str, places: np.ndarray, words: np.ndarray) -> None:
        places = self._starts[name] + places
        new = self._words[places] != words
        changes.add(places[new], words[new])

    def _send(self, changes: _Changes) -> None:
        places, values = sent = changes.array()
        if len(places):
            self._ops.update_rows(self.arrays.words, *self._device.upload(sent))
            self._words[places] = values


class _Changes:
    """Words that change: their places and values, bit by bit."""

    def __init__(self, places: list[Any], values: list[Any]) -> None:
        self._places = places
        self._values = values

    def add(self, places: Any, values: Any) -> None:
        self._places.append(places)
        self._values.append(values)

    def array(self) -> np.ndarray:
        """Places above values: (2, N) int32."""
        return np.array([np.concatenate(self._places), np.concatenate(self._values)], np.int32)
