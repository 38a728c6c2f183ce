"""Decides, before every step, which tokens of which sequences run. Plain Python over lists; imports no array library.

A plan holds decode rows first, one token each, then chunks of prompts, all under one token budget. Pages are reserved
here, so a step that was planned can always run. Sequences are ranked by priority, then by arrival. The rules:

- Decodes go first, so a long prompt cannot stall them.
- The first unfinished prompt gets half of what the decodes left, the other prompts share the rest first come, first
  served, and what they leave goes to the first: a long prompt advances in every step, and short ones need not wait
  for its end.
- When pages run out the lowest-ranked sequence is preempted: its pages are let go, its tokens kept, and it waits at
  its old place to be recomputed. The first sequence is never preempted while another runs, so it always finishes.
- A waiting sequence is admitted when all its known tokens and one more fit in the available pages. Pages that the
  prefix cache knows are taken over; the last known token always runs, since its logits are wanted.
- Sequences that were forked share pages. Who writes to a shared page gets a copy of it first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from cupyllm.page_allocator import PageAllocator
from cupyllm.prefix_cache import CachedPage, PrefixCache
from cupyllm.sequence import Sequence, rank


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
    """What one step runs: the decode rows come first in `chunks`. Pages are copied (from, to) before anything runs."""

    chunks: tuple[PlannedChunk, ...]
    num_decodes: int
    page_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class Scheduler:
    """Owns the running and the waiting sequences, each list in order of rank. `prefix_cache` None turns reuse off."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_decode_batch_size: int,
        max_prefill_batch_size: int,
        max_step_tokens: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        assert max_step_tokens >= max_decode_batch_size
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        self.page_size = page_size
        self.max_decode_batch_size = max_decode_batch_size
        self.max_prefill_batch_size = max_prefill_batch_size
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._page_copies: list[tuple[int, int]] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is, and let its pages go."""
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)
        self._release_pages(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on where `parent` stands, over the same pages. Without a free row it waits to be recomputed."""
        if len(self.running) >= self.max_decode_batch_size or parent not in self.running:
            self.add(child)
            return
        child.page_table = parent.page_table[: self._pages_for(parent.num_computed)]
        self.allocator.share(child.page_table)
        child.num_computed = parent.num_computed
        child.cached_pages = list(parent.cached_pages)
        insort(self.running, child, key=rank)

    def plan(self) -> Plan:
        """Choose the next step's tokens and reserve their pages. An empty plan means there is nothing to run."""
        self._page_copies = []
        decodes = self._plan_decodes()
        prompts = self._plan_prompts(self.max_step_tokens - len(decodes))
        # The reservation of a prompt may have preempted a decode that ranks below it.
        decodes = [chunk for chunk in decodes if chunk.sequence in self.running]
        # Until here a copy's source had a holder of its own, so that no other copy could be planned into it.
        self.allocator.release([source for source, _ in self._page_copies])
        return Plan(tuple(decodes + prompts), len(decodes), tuple(self._page_copies))

    def commit(self, plan: Plan) -> None:
        """The step ran: the planned tokens have their keys and values in the cache, and full pages can be published."""
        for chunk in plan.chunks:
            chunk.sequence.num_computed = chunk.start + chunk.length
            if self.prefix_cache is not None:
                self._publish_full_pages(chunk.sequence, self.prefix_cache)

    def check_integrity(self) -> None:
        """Assert what must hold between steps; raises AssertionError naming what does not."""
        tables = [sequence.page_table for sequence in (*self.running, *self.waiting)]
        self.allocator.check_integrity(tables)
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        assert len(self.running) <= self.max_decode_batch_size
        for sequence in self.waiting:
            assert not sequence.page_table, f"sequence {sequence.id} waits and holds pages"
            assert sequence.num_computed == 0, f"sequence {sequence.id} waits and has computed tokens"
        for queue in (self.running, self.waiting):
            ranks = [rank(sequence) for sequence in queue]
            assert ranks == sorted(set(ranks)), f"sequences are not in order of rank: {ranks}"
        for sequence in self.running:
            assert sequence.finish_reason is None, f"sequence {sequence.id} is finished and runs"
            assert sequence.num_computed < sequence.num_tokens
            assert len(sequence.page_table) >= self._pages_for(sequence.num_computed)

    def _plan_decodes(self) -> list[PlannedChunk]:
        chunks = []
        for sequence in self._still_running([sequence for sequence in self.running if sequence.is_decoding]):
            if self._reserve(sequence, sequence.num_tokens):
                chunks.append(PlannedChunk(sequence, sequence.num_computed, 1))
        return chunks

    def _plan_prompts(self, budget: int) -> list[PlannedChunk]:
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        prompts = prompts[: self.max_prefill_batch_size]
        most = min(self.max_prefill_batch_size, budget)
        while len(prompts) < most and self.waiting and len(self.running) < self.max_decode_batch_size:
            if not self._admit(self.waiting[0]):
                break
            insort(prompts, self.waiting.pop(0), key=rank)
        lengths = share_budget([sequence.num_uncomputed for sequence in prompts], budget)
        length_of = dict(zip([sequence.id for sequence in prompts], lengths, strict=True))
        chunks = []
        for sequence in self._still_running(prompts):
            length = length_of[sequence.id]
            if length and self._reserve(sequence, sequence.num_computed + length):
                chunks.append(PlannedChunk(sequence, sequence.num_computed, length))
        return chunks

    def _still_running(self, sequences: list[Sequence]) -> Iterator[Sequence]:
        """The sequences in turn, but for those that a reservation on the way has preempted."""
        return (sequence for sequence in sequences if sequence in self.running)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` pages of its own to write its tokens up to `num_tokens` to; False if it was preempted.

        Pages that are missing are taken from the lowest-ranked running sequences.
        """
        table, first = sequence.page_table, sequence.num_computed // self.page_size
        while True:
            must_copy = first < len(table) and self.allocator.is_shared(table[first])
            missing = self._pages_for(num_tokens) - len(table)
            if missing + must_copy <= self.allocator.num_available:
                break
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        if must_copy:
            (copy,) = self.allocator.allocate(1)
            self._page_copies.append((table[first], copy))  # its holder moves from the table to the plan
            table[first] = copy
        if missing > 0:
            table.extend(self.allocator.allocate(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release_pages(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=rank)

    def _admit(self, sequence: Sequence) -> bool:
        """Take over the pages that the prefix cache knows and start running, if the rest fits too."""
        hits = self._find_hits(sequence)
        unheld = sum(not self.allocator.is_live(hit.page) for hit in hits)
        wanted = self._pages_for(sequence.num_tokens + 1) - len(hits) + unheld
        promised = sum(self._pages_for(s.num_tokens) - len(s.page_table) for s in self.running if not s.is_decoding)
        if wanted + promised > self.allocator.num_available:
            return False
        sequence.page_table = [hit.page for hit in hits]
        self.allocator.share(sequence.page_table)
        sequence.cached_pages = hits
        sequence.num_computed = len(hits) * self.page_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed
        insort(self.running, sequence, key=rank)
        return True

    def _find_hits(self, sequence: Sequence) -> list[CachedPage]:
        if self.prefix_cache is None:
            return []
        return self.prefix_cache.find(sequence.token_ids[:-1], sequence.cache_salt)

    def _publish_full_pages(self, sequence: Sequence, prefix_cache: PrefixCache) -> None:
        known = sequence.cached_pages
        while (len(known) + 1) * self.page_size <= sequence.num_computed:
            start = len(known) * self.page_size
            ids = sequence.token_ids[start : start + self.page_size]
            parent = known[-1] if known else None
            known.append(prefix_cache.publish(sequence.page_table[len(known)], ids, parent, sequence.cache_salt))

    def _release_pages(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.page_table)
        sequence.page_table = []
        sequence.cached_pages = []

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def share_budget(wanted: list[int], budget: int) -> list[int]:
    """Split a token budget over prompts, first one first: half for it, then first come, first served, the rest back.

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
