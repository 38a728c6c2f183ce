"""The sequences behind beam searches: which rows belong to a search, and how they fork, wait for each other and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cupyllm.beam_search import BeamSearch, Continuation
from cupyllm.sampling_batch import SampleResult
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import FinishReason, Sequence


class BeamRows:
    """All live beams of an engine. `new_id` numbers the sequences that forks make."""

    def __init__(self, scheduler: Scheduler, new_id: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._new_id = new_id
        self._search_of: dict[int, BeamSearch] = {}  # by sequence id

    def __len__(self) -> int:
        return len(self._search_of)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._search_of

    def start(self, search: BeamSearch, sequence: Sequence) -> None:
        """Make a sequence that has just been queued the first beam of a search: it offers tokens, and never ends."""
        sequence.is_beam = True
        sequence.end_token_ids = frozenset()
        sequence.max_tokens = sequence.most_tokens = 2**31
        search.live = {sequence.id: (sequence, 0.0)}
        self._search_of[sequence.id] = search

    def offer(self, sequence: Sequence, sampled: SampleResult, row: int) -> None:
        """Pass what a row of logits says is likely next to the beam's search."""
        search = self._search_of[sequence.id]
        ids, logprobs = sampled.top_ids[row].tolist(), sampled.top_logprobs[row].tolist()
        search.offer(sequence, list(zip(ids, logprobs, strict=True))[: search.num_offers])
        search.failed |= bool(sampled.token_ids[row] < 0)

    def advance(self) -> list[BeamSearch]:
        """Let every search whose beams have all made their offers go on; returns those that have ended.

        Beams that have made theirs while others have not, such as after a preemption, are paused.
        """
        ended = []
        for search in {id(search): search for search in self._search_of.values()}.values():
            if not search.failed and not search.is_complete:
                for sequence, _ in search.live.values():
                    if search.has_offer(sequence):
                        self._scheduler.pause(sequence)
                continue
            self._go_on(search, [] if search.failed else search.advance())
            if search.done:
                ended.append(search)
        return ended

    def drop(self, search: BeamSearch) -> None:
        """End a search now, with what it has finished."""
        self._go_on(search, [])

    def drop_all(self) -> None:
        """End all searches after a step failed."""
        for search in {id(search): search for search in self._search_of.values()}.values():
            search.failed = True
            self.drop(search)

    def _go_on(self, search: BeamSearch, chosen: list[Continuation]) -> None:
        """Append, fork and drop, so that exactly the chosen beams live; with none of them the search is done."""
        firsts = {continuation.parent.id: continuation for continuation in reversed(chosen)}
        for sequence, _ in search.live.values():
            if sequence.id not in firsts:  # dropped before the others fork, so that they find its row free
                del self._search_of[sequence.id]
                sequence.finish_reason = FinishReason.ERROR if search.failed else FinishReason.STOP
                self._scheduler.remove(sequence)
        # A beam's best continuation keeps the sequence. It comes after the forks, which copy what was there before.
        forks = [(c, self._fork(c.parent)) for c in chosen if firsts[c.parent.id] is not c]
        beams = {id(c): c.parent for c in firsts.values()} | {id(c): child for c, child in forks}
        search.live = {}
        for continuation in chosen:
            beam = beams[id(continuation)]
            beam.append(continuation.token_id)
            self._scheduler.resume(beam)
            search.live[beam.id] = (beam, continuation.logprob)
        search.done = not chosen

    def _fork(self, parent: Sequence) -> Sequence:
        child = replace(
            parent,
            id=self._new_id(),
            arrival=parent.id if parent.arrival is None else parent.arrival,
            token_ids=list(parent.token_ids),
            page_table=[],
            cached_pages=[],
            num_computed=0,
            num_preemptions=0,
            row=None,
        )
        self._search_of[child.id] = self._search_of[parent.id]
        self._scheduler.fork(parent, child)
        return child
