"""Decides, before every step, which tokens of which sequences run. Plain Python over lists; imports no array library.

A plan holds decode rows first, one token each, then chunks of prompts, all under one token budget. Pages are reserved
here, so a step that was planned can always run. Sequences are ranked by priority, then by arrival. The rules:

- Every decoding sequence runs in every step, so a long prompt cannot stall it.
- The first unfinished prompt gets half of what the decodes left, the other prompts share the rest first come, first
  served, and what they leave goes to the first: a long prompt advances in every step, and short ones need not wait
  for its end.
- When pages run out the lowest-ranked sequence is preempted: its pages are let go, its tokens kept, and it waits at
  its old place to be recomputed. The first sequence is never preempted while another runs, so it always finishes.
- A waiting sequence is admitted when all its known tokens and one more fit in the available pages. Pages that the
  prefix cache knows are taken over; the last known token always runs, since its logits are wanted.
- Sequences that were forked share pages. Who writes to a shared page gets a copy of it first.
- A paused sequence, a beam that waits for the others of its search, has no row. Its pages stay until they are needed.
- With more than MOST_GROWING rows, rows get their next page some steps early, so that no more than these get one in a
  step even if all would need it in the same: what a step sends to the device about pages stays small. Nobody else goes
  without for that: before a sequence is preempted or left waiting, all pages that are held early are taken back.

A step in which the same sequences decode costs little: only those that enter a new page are looked at one by one.
"""

from __future__ import annotations

from bisect import insort

from cupyllm.page_allocator import PageAllocator
from cupyllm.plan import Plan, PlannedChunk, share_budget
from cupyllm.prefix_cache import CachedPage, PrefixCache
from cupyllm.sequence import PENDING, FinishReason, Sequence, by_rank

# Rows that get a page in one step, where that can be chosen.
MOST_GROWING = 31


class Scheduler:
    """Owns the sequences: `waiting` and `prefilling` in order of rank, `decoding` in order of rows, and `paused`."""

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
        """`prefix_cache` None turns the reuse of pages off."""
        assert max_step_tokens >= max_decode_batch_size
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        self.page_size = page_size
        self.max_decode_batch_size = max_decode_batch_size
        self.max_prefill_batch_size = max_prefill_batch_size
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # prompt tokens of sequences when they were admitted first
        self.num_prefix_hits = 0  # and those of them that the prefix cache knew
        self._page_copies: list[tuple[int, int]] = []
        self._forked: list[Sequence] = []  # decode rows that may stand in a page they share
        self._is_short = False  # whether this plan wanted more pages than were available

    @property
    def num_running(self) -> int:
        """Sequences that have, or will have, a row."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def running(self) -> list[Sequence]:
        """All sequences that may hold pages, in order of rank."""
        return sorted((*self.prefilling, *self.decoding, *self.paused), key=by_rank)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=by_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is, and let its pages go."""
        self._take_out(sequence)
        self._release_pages(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, a copy of `parent` whose tokens have all been computed, go on over the same pages.

        Without a free row it waits to be recomputed. Both must get a token before the next plan.
        """
        if self.num_running >= self.max_decode_batch_size or not parent.page_table:
            self.add(child)
            return
        child.page_table = parent.page_table[: self._pages_for(parent.num_tokens)]
        self.allocator.share(child.page_table)
        child.cached_pages = list(parent.cached_pages)
        self._forked += [parent, child]
        insort(self.prefilling, child, key=by_rank)

    def pause(self, sequence: Sequence) -> None:
        """Take a sequence whose tokens have all been computed out of its row; its pages stay while there is room."""
        if sequence not in self.paused:
            self._take_out(sequence)
            self._take_early_pages(sequence)
            sequence.num_computed = sequence.num_tokens
            insort(self.paused, sequence, key=by_rank)

    def resume(self, sequence: Sequence) -> None:
        """Let a paused sequence, which got a token, go on; without pages or a free row it waits to be recomputed."""
        if sequence not in self.paused:
            return
        self.paused.remove(sequence)
        if sequence.page_table and self.num_running < self.max_decode_batch_size:
            insort(self.prefilling, sequence, key=by_rank)
        else:
            self._send_to_wait(sequence)

    def plan(self) -> Plan:
        """Choose the next step's tokens and reserve their pages. An empty plan means there is nothing to run."""
        self._page_copies = []
        self._is_short = False
        try:
            has_joined = self._join_rows()
            entering, growing = self._plan_decodes()
            prompts = self._plan_prompts(self.max_step_tokens - len(self.decoding))
            while self.num_running == 0 and self.waiting:
                self._take_pages_of_paused()
                prompts = self._plan_prompts(self.max_step_tokens)
            growing = growing + self._give_early(len(growing), all_at_once=has_joined)
        finally:
            # Until here a copy's source had a holder of its own, so that no other copy could be planned into it.
            if self._page_copies:
                self.allocator.release([source for source, _ in self._page_copies])
        return Plan(list(self.decoding), prompts, self._page_copies, entering, growing)

    def commit(self, plan: Plan) -> None:
        """The step ran: the planned prompt chunks have their keys and values in the cache.

        Decode rows are told by Sequence.append; their pages are published when they enter the next one.
        """
        for chunk in plan.prompts:
            chunk.sequence.num_computed = chunk.start + chunk.length
            self._publish_full_pages(chunk.sequence)

    def check_integrity(self) -> None:
        """Assert what must hold between steps; raises AssertionError naming what does not."""
        running = self.running
        self.allocator.check_integrity([sequence.page_table for sequence in (*running, *self.waiting)])
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        assert self.num_running <= self.max_decode_batch_size
        assert [sequence.row for sequence in self.decoding] == list(range(len(self.decoding)))
        for sequence in self.waiting:
            assert not sequence.page_table, f"sequence {sequence.id} waits and holds pages"
            assert sequence.num_computed == 0, f"sequence {sequence.id} waits and has computed tokens"
        for queue in (self.prefilling, self.waiting):
            ranks = [sequence.rank for sequence in queue]
            assert ranks == sorted(set(ranks)), f"sequences are not in order of rank: {ranks}"
            assert all(sequence.row is None for sequence in queue)
        for sequence in running:
            assert sequence.finish_reason is None, f"sequence {sequence.id} is finished and runs"
            assert sequence.num_uncomputed > 0 or sequence in self.paused
            assert sequence.page_table or sequence.num_computed == 0
            early = self._steps_early(self.max_decode_batch_size) if sequence.row is not None else 0
            last = max(min(sequence.num_tokens + early, sequence.most_tokens), sequence.num_tokens)
            fewest, most = self._pages_for(sequence.num_computed), self._pages_for(last)
            assert fewest <= len(sequence.page_table) <= most, f"sequence {sequence.id} has too few or too many pages"

    def _join_rows(self) -> bool:
        """Give a row to whoever has only one token left to run; says whether there was anyone."""
        joining = [sequence for sequence in self.prefilling if sequence.is_decoding]
        for sequence in joining:
            self.prefilling.remove(sequence)
            sequence.row = len(self.decoding)
            self.decoding.append(sequence)
        return bool(joining)

    def _plan_decodes(self) -> tuple[list[Sequence], list[Sequence]]:
        """Give every decode row the page that its token goes to; who gets none is preempted and leaves its row.

        Returns the rows that enter a page, and those that got one.
        """
        page_size, first_of_page = self.page_size, 1 % self.page_size
        entering = [s for s in self.decoding if len(s.token_ids) % page_size == first_of_page]
        growing = [s for s in entering if len(s.token_ids) > len(s.page_table) * page_size]
        forked, self._forked = self._forked, []
        for sequence in entering:
            self._publish_full_pages(sequence)
        if not forked and self._has_room(len(growing)):
            self._append_pages(growing)  # one for each, so their order is no matter
            return entering, growing
        self._reserve_by_rank(entering, forked)
        return entering, entering

    def _give_early(self, num_growing: int, *, all_at_once: bool) -> list[Sequence]:
        """Give rows their next page before they need it, of pages that nobody wants now, and return these rows.

        At most MOST_GROWING get one, with those that needed it, first who needs it first. A step in which a row joins
        may give one to all: the device is sent more than pages then.
        """
        early = self._steps_early(len(self.decoding))
        may_wait_for_pages = self.waiting and self.num_running < self.max_decode_batch_size
        if early == 0 or self._is_short or may_wait_for_pages:
            return []
        page_size = self.page_size
        soon = [s for s in self.decoding if len(s.token_ids) + early > len(s.page_table) * page_size]
        soon = [s for s in soon if len(s.page_table) * page_size < s.most_tokens]
        if not all_at_once and num_growing + len(soon) > MOST_GROWING:
            soon.sort(key=lambda s: len(s.page_table) * page_size - len(s.token_ids))
            soon = soon[: max(MOST_GROWING - num_growing, 0)]
        soon = soon[: self.allocator.num_available]
        self._append_pages(soon)
        return soon

    def _append_pages(self, sequences: list[Sequence]) -> None:
        for sequence, page in zip(sequences, self.allocator.allocate(len(sequences)), strict=True):
            sequence.page_table.append(page)

    def _has_room(self, num_pages: int) -> bool:
        """Whether so many pages are available, if need be without those that rows hold early."""
        if num_pages > self.allocator.num_available:
            self._is_short = True
            for sequence in self.decoding:
                self._take_early_pages(sequence)
        return num_pages <= self.allocator.num_available

    def _take_early_pages(self, sequence: Sequence) -> None:
        num_needed = self._pages_for(sequence.num_tokens)
        if len(sequence.page_table) > num_needed:
            self.allocator.release(sequence.page_table[num_needed:])
            del sequence.page_table[num_needed:]

    def _steps_early(self, num_rows: int) -> int:
        """How many steps before it is needed so many rows are given a page, so that MOST_GROWING a step suffice."""
        return min(max(num_rows - 1, 0) // MOST_GROWING, self.page_size - 1)

    def _reserve_by_rank(self, entering: list[Sequence], forked: list[Sequence]) -> None:
        """Reserve the page that each row enters, the first in rank first; forked rows may need copies."""
        for sequence in sorted((*entering, *forked), key=by_rank):
            if sequence.row is not None:  # else preempted on the way here, or gone
                self._reserve(sequence, sequence.num_tokens)

    def _plan_prompts(self, budget: int) -> list[PlannedChunk]:
        if not self.prefilling and not self.waiting:
            return []
        prompts = self.prefilling[: self.max_prefill_batch_size]
        most = min(self.max_prefill_batch_size, budget)
        while len(prompts) < most and self.waiting and self.num_running < self.max_decode_batch_size:
            if not self._admit(self.waiting[0]):
                break
            insort(prompts, self.waiting.pop(0), key=by_rank)
        chunks = []
        lengths = share_budget([sequence.num_uncomputed for sequence in prompts], budget)
        for sequence, length in zip(prompts, lengths, strict=True):
            # The reservation of a prompt before it may have preempted this one already.
            if length and sequence in self.prefilling and self._reserve(sequence, sequence.num_computed + length):
                chunks.append(PlannedChunk(sequence, sequence.num_computed, length))
        return chunks

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give `sequence` pages of its own to write its tokens up to `num_tokens` to; False if it was preempted.

        Pages that are missing are taken from the lowest-ranked running sequences.
        """
        table, first = sequence.page_table, sequence.num_computed // self.page_size
        while True:
            must_copy = first < len(table) and self.allocator.is_shared(table[first])
            missing = max(self._pages_for(num_tokens) - len(table), 0)  # a row may hold one early
            if self._has_room(missing + must_copy):
                break
            last = next(holder for holder in reversed(self.running) if holder.page_table or holder is sequence)
            self._preempt(last)
            if last is sequence:
                return False
        if must_copy:
            (copy,) = self.allocator.allocate(1)
            self._page_copies.append((table[first], copy))  # its holder moves from the table to the plan
            table[first] = copy
        table.extend(self.allocator.allocate(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._cancel_copies(sequence)
        if sequence in self.paused:
            self._release_pages(sequence)
        else:
            self._take_out(sequence)
            self._send_to_wait(sequence)

    def _cancel_copies(self, sequence: Sequence) -> None:
        """A copy that was planned for a sequence is not wanted any more, and its source need not be held for it."""
        for source, copy in [pair for pair in self._page_copies if pair[1] in sequence.page_table]:
            self._page_copies.remove((source, copy))
            self.allocator.release([source])

    def _take_pages_of_paused(self) -> None:
        """Preempt the lowest-ranked paused sequence that holds pages. When none does, every waiting one fits."""
        self._preempt(next(sequence for sequence in reversed(self.paused) if sequence.page_table))

    def _send_to_wait(self, sequence: Sequence) -> None:
        self._release_pages(sequence)
        insort(self.waiting, sequence, key=by_rank)

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self._leave_row(sequence)
        else:
            next(queue for queue in (self.prefilling, self.waiting, self.paused) if sequence in queue).remove(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Take over the pages that the prefix cache knows and start running, if the rest fits too."""
        if sequence.token_ids[-1] == PENDING:
            return False  # preempted by this very plan
        hits = self._find_hits(sequence)
        unheld = sum(not self.allocator.is_live(hit.page) for hit in hits)
        most = min(sequence.num_tokens + 1, sequence.most_tokens)
        wanted = self._pages_for(most) - len(hits) + unheld
        promised = sum(max(self._pages_for(s.num_tokens) - len(s.page_table), 0) for s in self.prefilling)
        if not self._has_room(wanted + promised):
            return False
        sequence.page_table = [hit.page for hit in hits]
        self.allocator.share(sequence.page_table)
        sequence.cached_pages = hits
        sequence.num_computed = len(hits) * self.page_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed
            if self.prefix_cache is not None and sequence.readout is None:
                self.num_prefix_queries += sequence.num_tokens
                self.num_prefix_hits += sequence.num_computed
        insort(self.prefilling, sequence, key=by_rank)
        return True

    def _leave_row(self, sequence: Sequence) -> None:
        """Give the row to the last sequence, so that no other one moves."""
        row, last = sequence.row, self.decoding.pop()
        assert row is not None
        if last is not sequence:
            self.decoding[row] = last
            last.row = row
        sequence.row = None

    def _find_hits(self, sequence: Sequence) -> list[CachedPage]:
        if self.prefix_cache is None or sequence.readout is not None:
            return []
        return self.prefix_cache.find(sequence.token_ids[:-1], sequence.cache_salt)

    def _publish_full_pages(self, sequence: Sequence) -> None:
        """Make the pages known whose tokens have all been computed."""
        if self.prefix_cache is None:
            return
        known, page_size = sequence.cached_pages, self.page_size
        for start in range(len(known) * page_size, sequence.num_computed - page_size + 1, page_size):
            ids = sequence.token_ids[start : start + page_size]
            parent = known[-1] if known else None
            known.append(self.prefix_cache.publish(sequence.page_table[len(known)], ids, parent, sequence.cache_salt))

    def _release_pages(self, sequence: Sequence) -> None:
        self._publish_full_pages(sequence)
        if self.prefix_cache is not None and sequence.finish_reason is FinishReason.ERROR:
            self.prefix_cache.withdraw(sequence.cached_pages)  # what made it fail may stand in its pages
        self.allocator.release(sequence.page_table)
        sequence.page_table = []
        sequence.cached_pages = []
        sequence.num_computed = 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
