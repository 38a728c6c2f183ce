"""Does around a scheduler what the engine does, without a model: sampled tokens are drawn, and everything is checked.

Sequences come alone, as several answers to one prompt (forked when the prompt has been computed, as by
Engine.add_parallel), or as a group of beams (paused until all have made an offer, then continued, forked and dropped,
as by BeamRows, but with any choice of survivors).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cupyllm.batch import BatchBuilder
from cupyllm.page_allocator import PageAllocator
from cupyllm.plan import Plan
from cupyllm.prefix_cache import PrefixCache
from cupyllm.sampling import SamplingParams
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import FinishReason, Sequence, by_rank
from tests.proof.cache_model import CacheModel, check_batch

ANY = SamplingParams()
NO_IDS: frozenset[int] = frozenset()
VOCAB = 3  # so few that prompts and answers often meet, which is what prefix hits need


@dataclass(frozen=True)
class Limits:
    """The pool and the limits of a scheduler."""

    num_pages: int = 9
    page_size: int = 4
    rows: int = 4
    prefills: int = 2
    budget: int = 12
    prefix_cache: bool = True
    one_hash: bool = False  # every key of the prefix cache is the same

    @property
    def longest(self) -> int:
        return self.num_pages * self.page_size


@dataclass(eq=False)
class Beams:
    """A group of sequences that go on together. `steps_left` tokens are still to come."""

    width: int
    steps_left: int
    live: list[Sequence] = field(default_factory=list)
    offered: set[int] = field(default_factory=set)


class Driver:
    """One scheduler, the model of its cache, and the sequences that are not finished."""

    def __init__(self, limits: Limits, seed: int, *, check: bool = True) -> None:
        self.limits, self.check = limits, check
        self.rng = random.Random(seed)
        self.allocator = PageAllocator(limits.num_pages)
        self.scheduler = Scheduler(
            self.allocator,
            page_size=limits.page_size,
            max_decode_batch_size=limits.rows,
            max_prefill_batch_size=limits.prefills,
            max_step_tokens=limits.budget,
            prefix_cache=self._make_prefix_cache() if limits.prefix_cache else None,
        )
        self.cache = CacheModel(limits.num_pages, limits.page_size)
        self.batches = BatchBuilder(limits.page_size)
        self.unforked: dict[int, list[Sequence]] = {}
        self.beams: dict[int, Beams] = {}  # by sequence id
        self.next_id = self.num_ended = self.num_tokens = self.num_forks = self.num_copies = 0

    def _make_prefix_cache(self) -> PrefixCache:
        if self.limits.one_hash:
            return PrefixCache(self.allocator, page_size=self.limits.page_size, digest=lambda data: b"same")
        return PrefixCache(self.allocator, page_size=self.limits.page_size)

    @property
    def live(self) -> list[Sequence]:
        """Every sequence that is not finished, in order of id."""
        unforked = [sequence for others in self.unforked.values() for sequence in others]
        return sorted([*self.scheduler.running, *self.scheduler.waiting, *unforked], key=lambda sequence: sequence.id)

    @property
    def demand(self) -> float:
        """The pages that all live sequences would take at their longest, in pools."""
        pages = sum(-(-self._most_tokens(sequence) // self.limits.page_size) for sequence in self.live)
        return pages / self.limits.num_pages

    def _most_tokens(self, sequence: Sequence) -> int:
        if sequence.id in self.beams:
            return sequence.num_tokens + self.beams[sequence.id].steps_left
        return sequence.most_tokens

    def make_sequence(self, prompt: list[int], max_tokens: int, priority: int = 0, salt: str = "") -> Sequence:
        self.next_id += 1
        return Sequence(
            id=self.next_id - 1,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=ANY,
            seed=0,
            max_tokens=max_tokens,
            end_token_ids=NO_IDS,
            priority=priority,
            cache_salt=salt,
        )

    def add(self, prompt: list[int], max_tokens: int, *, answers: int = 1, priority: int = 0, salt: str = "") -> None:
        """One prompt, of which the tokens run once, for one or several answers."""
        lengths = [max_tokens, *(self.rng.randint(1, max_tokens) for _ in range(answers - 1))]
        first, *others = [self.make_sequence(prompt, length, priority, salt) for length in lengths]
        if others:
            self.unforked[first.id] = others
        self.scheduler.add(first)

    def add_beams(self, prompt: list[int], steps: int, width: int, *, priority: int = 0, salt: str = "") -> None:
        sequence = self.make_sequence(prompt, 2**31, priority, salt)
        self.beams[sequence.id] = Beams(width, steps, [sequence])
        self.scheduler.add(sequence)

    def step(self) -> Plan:
        """Plan, check, run on the modelled cache, commit, and give every sequence its token."""
        before = self._before_plan() if self.check else None
        plan = self.scheduler.plan()
        if before is not None:
            before.check(plan, self)
        if not plan:
            return plan
        batch = self.batches.build(plan)
        if self.check:
            check_batch(batch, plan, self.limits.page_size)
            self.cache.run(plan, self.allocator)
        self.num_copies += len(plan.page_copies)
        self.scheduler.commit(plan)
        self._sample(plan)
        return plan

    def abort(self, sequence: Sequence) -> None:
        """End one sequence, and with a beam its whole group."""
        if sequence.id in self.beams:
            for beam in self.beams[sequence.id].live:
                self._remove(beam)
                del self.beams[beam.id]
            return
        for others in self.unforked.values():
            if sequence in others:
                others.remove(sequence)
                self.num_ended += 1
                return
        for other in self.unforked.pop(sequence.id, []):
            self.scheduler.add(other)
        self._remove(sequence)

    def check_books(self) -> None:
        """The scheduler's own check, and the contents of every page that somebody holds or could be offered."""
        self.scheduler.check_integrity()
        for sequence in self.scheduler.running:
            self.cache.check(sequence, sequence.num_computed)
        if self.scheduler.prefix_cache is not None:
            for sequence in self.live:
                hits = self.scheduler.prefix_cache.find(sequence.token_ids, sequence.cache_salt)
                self.cache.check_pages([hit.page for hit in hits], sequence.cache_salt, sequence.token_ids)

    def _before_plan(self) -> BeforePlan:
        scheduler = self.scheduler
        first = min(scheduler.running, key=by_rank, default=None)
        has_work = bool(scheduler.num_running or scheduler.waiting)
        if first is not None and first in scheduler.paused:
            first = None  # it waits for its group
        return BeforePlan(has_work, first, first.num_preemptions if first else 0)

    def _sample(self, plan: Plan) -> None:
        groups: list[Beams] = []
        for sequence in list(self._sampled(plan)):
            self.num_tokens += 1
            if sequence.id in self.beams:
                groups.append(self.beams[sequence.id])
                groups[-1].offered.add(sequence.id)
            elif sequence.append(self.rng.randrange(VOCAB)) is not None:
                self._remove(sequence)
        for group in dict.fromkeys(groups):
            self._advance(group)

    def _sampled(self, plan: Plan) -> Iterator[Sequence]:
        yield from plan.decodes
        for chunk in plan.prompts:
            if not chunk.reaches_end:
                continue
            others = self.unforked.pop(chunk.sequence.id, [])
            for other in others:
                self.num_forks += 1
                self.scheduler.fork(chunk.sequence, other)
            yield from (chunk.sequence, *others)

    def _advance(self, group: Beams) -> None:
        if not all(beam.id in group.offered for beam in group.live):
            for beam in group.live:
                if beam.id in group.offered:
                    self.scheduler.pause(beam)
            return
        group.offered.clear()
        group.steps_left -= 1
        parents = [] if group.steps_left == 0 else [self.rng.choice(group.live) for _ in range(group.width)]
        gone = [beam for beam in group.live if beam not in parents]
        survivors = list(dict.fromkeys(parents))
        children = [self._fork_beam(parent) for parent in survivors for _ in range(parents.count(parent) - 1)]
        for beam in (*survivors, *children):
            beam.append(self.rng.randrange(VOCAB))
            self.scheduler.resume(beam)
        group.live = [*survivors, *children]
        for beam in gone:
            self._remove(beam)
            del self.beams[beam.id]

    def _fork_beam(self, parent: Sequence) -> Sequence:
        child = self.make_sequence(parent.token_ids, 2**31, parent.priority, parent.cache_salt)
        arrival = parent.id if parent.arrival is None else parent.arrival
        child = replace(child, num_prompt_tokens=parent.num_prompt_tokens, arrival=arrival)
        self.beams[child.id] = self.beams[parent.id]
        self.num_forks += 1
        self.scheduler.fork(parent, child)
        return child

    def _remove(self, sequence: Sequence) -> None:
        sequence.finish_reason = sequence.finish_reason or FinishReason.ABORT
        self.scheduler.remove(sequence)
        assert sequence.page_table == []
        self.num_ended += 1


@dataclass(frozen=True)
class BeforePlan:
    """What stood before a plan, to check the plan with. `first` is first in rank of all that hold pages."""

    has_work: bool
    first: Sequence | None
    num_preemptions: int

    def check(self, plan: Plan, driver: Driver) -> None:
        limits, chunks = driver.limits, plan.chunks
        assert bool(plan) == self.has_work, "a step with work runs something"
        assert plan.num_tokens <= limits.budget
        assert len(plan.prompts) <= limits.prefills
        assert len(chunks) <= limits.rows
        assert len({chunk.sequence.id for chunk in chunks}) == len(chunks)
        for place, chunk in enumerate(chunks):
            assert chunk.sequence in driver.scheduler.running
            assert chunk.start == chunk.sequence.num_computed
            assert chunk.length >= 1
            assert place >= plan.num_decodes or chunk.sequence.is_decoding
        first = self.first
        if first is None or any(other.rank < first.rank for other in driver.scheduler.running):
            return  # there is none, or one of better rank has come
        assert first.num_preemptions == self.num_preemptions, "the first is never preempted"
        assert any(chunk.sequence is first for chunk in chunks), "the first advances in every step"
