"""What every step of an engine did, for whoever watches: which rows and chunks ran, who holds which page, who ended.

The engine calls the trace after each step, in its own thread, while somebody listens; else a step costs nothing more.
Pages are told as changes: whoever keeps a snapshot and applies the records in order has the page map after each step.
Looking costs time for the rows and for the pages that changed hands, never for the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cupyllm.engine import Engine
from cupyllm.page_map import PageMap, PageUse
from cupyllm.plan import Plan
from cupyllm.sequence import Sequence
from cupyllm.step_result import StepResult

# So many of those that wait are named; `num_waiting` counts them all.
MOST_NAMED_WAITING = 32


class SequenceFacts(NamedTuple):
    """A sequence as it stood when it was seen first, before the step of that record gave it a token."""

    id: int
    num_prompt_tokens: int
    num_cached_tokens: int | None  # of the prompt, found in the prefix cache; None while it waits
    num_output_tokens: int
    queued_at: float | None  # seconds of time.monotonic


class StepRecord(NamedTuple):
    """One step. Sequences are named by their ids; pages are as the step left them. A tuple, since that is made fast."""

    number: int  # 0 is the first one since somebody listens; what changed between two steps has the number of the last
    start_s: float  # time.monotonic
    seconds: float
    decode_ids: tuple[int, ...]  # in order of rows
    token_ids: tuple[int, ...]  # the sequences that got a token; with overlap those of the step before
    num_waiting: int
    num_live_pages: int
    num_cached_pages: int
    num_free_pages: int
    chunks: tuple[tuple[int, int, int], ...] = ()  # pieces of prompts: sequence, first token, length
    started: tuple[SequenceFacts, ...] = ()
    ended: tuple[tuple[int, str], ...] = ()  # sequence, finish reason
    preempted_ids: tuple[int, ...] = ()
    forks: tuple[tuple[int, int], ...] = ()  # parent, child
    page_copies: tuple[tuple[int, int], ...] = ()  # from, to
    evicted_pages: tuple[int, ...] = ()
    page_changes: tuple[PageUse, ...] = ()
    waiting_ids: tuple[int, ...] = ()  # the first of them

    @property
    def num_tokens(self) -> int:
        """Tokens that ran."""
        return len(self.decode_ids) + sum(length for _, _, length in self.chunks)


@dataclass(frozen=True)
class Snapshot:
    """Where the engine stands: what the records that follow are changes of."""

    number: int  # of the last record before it; -1 before the first
    num_pages: int
    page_size: int
    pages: tuple[PageUse, ...]  # all that are not free
    sequences: tuple[SequenceFacts, ...]  # those that run, and the first of those that wait
    num_waiting: int


class StepTrace:
    """Watches an engine and tells its listeners of every step. Belongs to the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listeners: list[Callable[[StepRecord], None]] = []
        self._number = -1

    def listen(self, listener: Callable[[StepRecord], None]) -> None:
        """Call `listener` with the record of every step from now on, in the engine's thread."""
        if not self._listeners:
            self._begin()
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[StepRecord], None]) -> None:
        """Do not call it any more; without listeners the engine is not watched."""
        self._listeners.remove(listener)
        if not self._listeners:
            self._engine.observer = None
            self._allocator.on_reuse = self._on_reuse
            self._pages.close()

    def snapshot(self) -> Snapshot:
        """Where the engine stands now. Somebody must be listening."""
        self.note_changes()
        return Snapshot(
            self._number,
            self._allocator.num_pages,
            self._engine.config.page_size,
            self._pages.all(),
            tuple(map(_facts, self._known.values())),
            self._engine.num_waiting,
        )

    def note_changes(self) -> None:
        """Make a record of what has changed since the last step, such as aborts while nothing runs, if anything has."""
        record = self._record(Plan([], [], []), StepResult(), time.monotonic())
        if (
            record.started
            or record.ended
            or record.preempted_ids
            or record.page_changes
            or self._num_waiting != record.num_waiting
        ):
            self._tell(record)

    def _begin(self) -> None:
        self._allocator = self._engine.scheduler.allocator
        self._on_reuse = self._allocator.on_reuse
        self._allocator.on_reuse = self._note_reuse
        self._evicted: list[int] = []
        self._number = -1
        self._num_waiting = 0
        self._known: dict[int, Sequence] = {}
        self._preemptions: dict[int, int] = {}  # sequence id -> how often, as last seen
        self._last: StepRecord | None = None
        self._last_decodes: list[Sequence] = []
        self._pages = PageMap(self._allocator)
        self._record(Plan([], [], []), StepResult(), time.monotonic())  # what runs already
        self._engine.observer = self._after_step

    def _note_reuse(self, page: int) -> None:
        self._evicted.append(page)
        self._on_reuse(page)

    def _after_step(self, plan: Plan, result: StepResult, start_s: float) -> None:
        self._number += 1
        record = self._record_like_last(plan, result, start_s) or self._record(plan, result, start_s)
        self._last, self._last_decodes = record, plan.decodes
        self._tell(record)

    def _record_like_last(self, plan: Plan, result: StepResult, start_s: float) -> StepRecord | None:
        """What `_record` would return, if the rows of the last step decode on, some into new pages, and that is all.

        So most steps are. The model has driven all else out of the processor's caches, and what costs now is to look
        at something: this looks at what the step has just made, at little more, and calls next to nothing.
        """
        last, decodes, waiting = self._last, plan.decodes, self._engine.scheduler.waiting
        if last is None or decodes != self._last_decodes or len(result.tokens) != 1:
            return None
        num_live = last.num_live_pages + len(plan.growing)
        if self._pages.num_touched != len(plan.growing) or self._allocator.num_live != num_live or self._evicted:
            return None
        (tokens,) = result.tokens
        if tokens.sequences != decodes or plan.prompts or waiting or last.num_waiting:
            return None
        return StepRecord(
            self._number,
            start_s,
            time.monotonic() - start_s,
            last.decode_ids,
            last.decode_ids,
            0,
            num_live,
            last.num_cached_pages,
            last.num_free_pages - len(plan.growing),
            page_changes=self._pages.lengthened(plan.growing) if plan.growing else (),
        )

    def _tell(self, record: StepRecord) -> None:
        self._num_waiting = record.num_waiting
        for listener in self._listeners:
            listener(record)

    def _record(self, plan: Plan, result: StepResult, start_s: float) -> StepRecord:
        scheduler, allocator = self._engine.scheduler, self._allocator
        waiting = scheduler.waiting[:MOST_NAMED_WAITING]
        running = (*scheduler.prefilling, *scheduler.decoding, *scheduler.paused)
        prompts = self._meet([chunk.sequence for chunk in plan.prompts])
        others = self._meet(running)
        met = prompts + others + self._meet(waiting)
        preempted = self._note_preempted() if scheduler.num_preemptions else ()
        # A copy takes a page's place in the middle of a table, and who was preempted may be back with as many pages.
        all_known, may_hide = self._known.values(), plan.page_copies or preempted
        for sequence in all_known if may_hide else self._pages.changed(all_known):
            self._pages.update(sequence)
        changes = self._pages.changes()
        ended = [sequence for sequence in all_known if sequence.finish_reason is not None]
        for sequence in ended:
            del self._known[sequence.id], self._preemptions[sequence.id]
        token_ids = _ids_that_got_a_token(result)
        evicted, self._evicted = tuple(self._evicted), []
        return StepRecord(
            number=self._number,
            start_s=start_s,
            seconds=time.monotonic() - start_s,
            decode_ids=tuple([sequence.id for sequence in plan.decodes]),
            chunks=tuple([(chunk.sequence.id, chunk.start, chunk.length) for chunk in plan.prompts]),
            token_ids=token_ids,
            started=tuple([_facts(sequence, token_ids.count(sequence.id)) for sequence in met]),
            ended=tuple([(s.id, str(s.finish_reason.value)) for s in ended if s.finish_reason is not None]),
            preempted_ids=preempted,
            forks=self._forks(others),
            page_copies=tuple(plan.page_copies),
            evicted_pages=evicted,
            page_changes=changes,
            waiting_ids=tuple([sequence.id for sequence in waiting]),
            num_waiting=self._engine.num_waiting,
            num_live_pages=allocator.num_live,
            num_cached_pages=allocator.num_cached,
            num_free_pages=allocator.num_free,
        )

    def _meet(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those that have not been seen before."""
        new = [sequence for sequence in sequences if sequence.id not in self._known]
        for sequence in new:
            self._known[sequence.id] = sequence
            self._preemptions[sequence.id] = sequence.num_preemptions
        return new

    def _forks(self, new: list[Sequence]) -> tuple[tuple[int, int], ...]:
        """Those of the new sequences that begin with pages and a token of another."""
        forked = {sequence.id: sequence for sequence in new if sequence.num_output_tokens and sequence.page_table}
        pairs = []
        for sequence in forked.values():
            older = [holder for holder in self._pages.holders(sequence.page_table[-1]) if holder not in forked]
            if older:
                pairs.append((older[-1], sequence.id))
        return tuple(pairs)

    def _note_preempted(self) -> tuple[int, ...]:
        preempted = [s for s in self._known.values() if s.num_preemptions > self._preemptions[s.id]]
        for sequence in preempted:
            self._preemptions[sequence.id] = sequence.num_preemptions
        return tuple([sequence.id for sequence in preempted])


def _facts(sequence: Sequence, num_new_tokens: int = 0) -> SequenceFacts:
    return SequenceFacts(
        sequence.id,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        sequence.num_output_tokens - sequence.num_pending - num_new_tokens,
        sequence.queued_at,
    )


def _ids_that_got_a_token(result: StepResult) -> tuple[int, ...]:
    return tuple(
        [
            sequence.id
            for tokens in result.tokens
            for sequence, token_id in zip(tokens.sequences, tokens.token_ids, strict=True)
            if token_id >= 0
        ]
    )
