"""Decides, before every step, which tokens of which sequences run. Plain Python over lists; imports no array library.

A plan holds decode rows first, one token each, then chunks of prompts, all under one token budget. Pages are
reserved here, so a step that was planned can always run. The rules:

- Decodes go first, so a long prompt cannot stall them.
- The oldest unfinished prompt gets half of what the decodes left, the other prompts share the rest first come,
  first served, and what they leave goes to the oldest: a long prompt advances in every step, and short ones need
  not wait for its end.
- When pages run out the youngest sequence is preempted: its pages are freed, its tokens kept, and it waits at its
  old place to be recomputed. The oldest sequence is never preempted while a younger one runs, so it always
  finishes.
- A waiting sequence is admitted when all its known tokens and one more fit in the free pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyllm.page_allocator import PageAllocator
from cupyllm.sequence import Sequence


@dataclass(frozen=True)
class PlannedChunk:
    """Run tokens [start, start + length) of a sequence: one token for a decode row, more for a piece of a prompt."""

    sequence: Sequence
    start: int
    length: int

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk holds the last known token, so that the next token can be sampled."""
        return self.start + self.length == self.sequence.num_tokens


@dataclass(frozen=True)
class Plan:
    """What one step runs: the decode rows come first in `chunks`."""

    chunks: tuple[PlannedChunk, ...]
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class Scheduler:
    """Owns the running and the waiting sequences, together in order of arrival: who waits is younger than all who
    run."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_decode_batch_size: int,
        max_prefill_batch_size: int,
        max_step_tokens: int,
    ) -> None:
        assert max_step_tokens >= max_decode_batch_size
        self.allocator = allocator
        self.page_size = page_size
        self.max_decode_batch_size = max_decode_batch_size
        self.max_prefill_batch_size = max_prefill_batch_size
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is, and free its pages."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self._release_pages(sequence)

    def plan(self) -> Plan:
        """Choose the next step's tokens and reserve their pages. An empty plan means there is nothing to run."""
        decodes = self._plan_decodes()
        prompts = self._plan_prompts(self.max_step_tokens - len(decodes))
        # The reservation of an older prompt may have preempted a younger decode.
        decodes = [chunk for chunk in decodes if chunk.sequence in self.running]
        return Plan(tuple(decodes + prompts), num_decodes=len(decodes))

    def commit(self, plan: Plan) -> None:
        """The step ran: the planned tokens have their keys and values in the cache."""
        for chunk in plan.chunks:
            chunk.sequence.num_computed = chunk.start + chunk.length

    def check_integrity(self) -> None:
        """Assert what must hold between steps; raises AssertionError naming what does not."""
        tables = [sequence.page_table for sequence in (*self.running, *self.waiting)]
        self.allocator.check_integrity(tables)
        assert len(self.running) <= self.max_decode_batch_size
        for sequence in self.waiting:
            assert not sequence.page_table, f"sequence {sequence.id} waits and holds pages"
            assert sequence.num_computed == 0, f"sequence {sequence.id} waits and has computed tokens"
        ids = [sequence.id for sequence in (*self.running, *self.waiting)]
        assert ids == sorted(set(ids)), f"sequences are not in order of arrival: {ids}"
        for sequence in self.running:
            assert sequence.finish_reason is None, f"sequence {sequence.id} is finished and runs"
            assert len(sequence.page_table) >= self._pages_for(sequence.num_computed)

    def _plan_decodes(self) -> list[PlannedChunk]:
        chunks = []
        for sequence in [sequence for sequence in self.running if sequence.is_decoding]:
            # An older sequence's reservation may have preempted this one already.
            if sequence in self.running and self._reserve(sequence, sequence.num_tokens):
                chunks.append(PlannedChunk(sequence, sequence.num_computed, 1))
        return chunks

    def _plan_prompts(self, budget: int) -> list[PlannedChunk]:
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        prompts = prompts[: self.max_prefill_batch_size]
        most = min(self.max_prefill_batch_size, budget)
        while len(prompts) < most and self._can_admit():
            prompts.append(self.waiting.pop(0))
            self.running.append(prompts[-1])
        lengths = share_budget([sequence.num_uncomputed for sequence in prompts], budget)
        chunks = []
        for sequence, length in zip(prompts, lengths, strict=True):
            # An older prompt's reservation may have preempted this one already.
            if length and sequence in self.running and self._reserve(sequence, sequence.num_computed + length):
                chunks.append(PlannedChunk(sequence, sequence.num_computed, length))
        return chunks

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` the pages for `num_tokens` tokens, preempting the youngest; False if that was itself."""
        missing = self._pages_for(num_tokens) - len(sequence.page_table)
        while missing > self.allocator.num_free:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        if missing > 0:
            sequence.page_table.extend(self.allocator.allocate(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release_pages(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.insert(0, sequence)

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_decode_batch_size:
            return False
        promised = sum(self._pages_for(s.num_tokens) - len(s.page_table) for s in self.running if not s.is_decoding)
        return self._pages_for(self.waiting[0].num_tokens + 1) + promised <= self.allocator.num_free

    def _release_pages(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.page_table)
        sequence.page_table = []

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def share_budget(wanted: list[int], budget: int) -> list[int]:
    """Split a token budget over prompts, oldest first: half for the oldest, then first come, first served, the rest
    back.

    >>> share_budget([1000, 20, 20], 512)
    [472, 20, 20]
    >>> share_budget([1000, 900, 20], 512)
    [256, 256, 0]
    """
    if not wanted:
        return []
    given = [min(wanted[0], -(-budget // 2))]
    left = budget - given[0]
    for want in wanted[1:]:
        given.append(min(want, left))
        left -= given[-1]
    given[0] += min(wanted[0] - given[0], left)
    return given
