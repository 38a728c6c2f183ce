"""The scheduler without a model: single rules first, then any order of operations against what must always hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cupyllm.page_allocator import PageAllocator
from cupyllm.plan import share_budget
from cupyllm.prefix_cache import PrefixCache
from cupyllm.sampling import SamplingParams
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import FinishReason, Sequence

PAGE_SIZE = 4


def make_scheduler(num_pages: int = 100, *, rows: int = 4, prefills: int = 4, budget: int = 16) -> Scheduler:
    return Scheduler(
        PageAllocator(num_pages),
        page_size=PAGE_SIZE,
        max_decode_batch_size=rows,
        max_prefill_batch_size=prefills,
        max_step_tokens=budget,
    )


def make_sequence(sequence_id: int, num_prompt_tokens: int, max_tokens: int = 100) -> Sequence:
    return Sequence(
        id=sequence_id,
        token_ids=[7] * num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        params=SamplingParams(),
        seed=0,
        max_tokens=max_tokens,
        end_token_ids=frozenset(),
    )


def run_step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """What the engine does around a plan, with token 7 for every sample; returns (id, start, length) of what ran."""
    plan = scheduler.plan()
    chunks = plan.chunks
    ended = [chunk.sequence for chunk in chunks if chunk.reaches_end]
    scheduler.commit(plan)
    for sequence in ended:
        if sequence.append(7) is not None:
            scheduler.remove(sequence)
    scheduler.check_integrity()
    return [(chunk.sequence.id, chunk.start, chunk.length) for chunk in chunks]


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_sequence(0, 40))
    assert [run_step(scheduler) for _ in range(4)] == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 8)], [(0, 40, 1)]]


def test_decodes_come_first_and_are_not_stalled_by_a_long_prompt() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_sequence(0, 3))
    run_step(scheduler)
    scheduler.add(make_sequence(1, 60))
    plan = scheduler.plan()
    assert [(chunk.sequence.id, chunk.start, chunk.length) for chunk in plan.chunks] == [(0, 3, 1), (1, 0, 15)]
    assert (plan.num_decodes, plan.num_tokens) == (1, 16)


def test_a_short_prompt_need_not_wait_for_the_end_of_a_long_one() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_sequence(0, 300))
    scheduler.add(make_sequence(1, 5))
    assert run_step(scheduler) == [(0, 0, 11), (1, 0, 5)]


def test_a_long_prompt_advances_in_every_step_of_a_flood_of_short_ones() -> None:
    scheduler = make_scheduler(budget=16, rows=8, prefills=8)
    long = make_sequence(0, 120)
    scheduler.add(long)
    for step in range(15):
        for k in range(3):
            scheduler.add(make_sequence(1 + 3 * step + k, 9, max_tokens=1))
        before = long.num_computed
        run_step(scheduler)
        assert long.num_computed >= before + 8
    assert long.num_computed == 120


def test_eight_decodes_a_long_prompt_and_a_short_one_all_advance_in_every_step() -> None:
    scheduler = make_scheduler(num_pages=400, rows=16, prefills=8, budget=64)
    for sequence_id in range(8):
        scheduler.add(make_sequence(sequence_id, 3))
    run_step(scheduler)
    scheduler.add(make_sequence(8, 900))
    run_step(scheduler)
    scheduler.add(make_sequence(9, 20))
    steps = [run_step(scheduler) for _ in range(12)]
    for ran in steps:
        assert [number for number, _, length in ran if length == 1][:8] == list(range(8)), "nobody's tokens wait"
        assert sum(length for number, _, length in ran if number == 8) >= (64 - 8) // 2, "the long one has half"
    assert (9, 0, 20) in steps[0], "the short one has its first token in the step that follows it"
    assert all((9, 19 + number, 1) in ran for number, ran in enumerate(steps) if number)


def test_the_youngest_is_preempted_and_keeps_its_tokens_and_its_place() -> None:
    scheduler = make_scheduler(num_pages=5, rows=4)
    old, young, waiting = make_sequence(0, 7), make_sequence(1, 7), make_sequence(2, 7)
    for sequence in (old, young, waiting):
        scheduler.add(sequence)
    run_step(scheduler)  # both prompts run in 2 pages each and give a token; the third does not fit
    run_step(scheduler)  # 9 tokens each from here: 3 pages, and there are 5
    assert run_step(scheduler) == [(0, 8, 1)]
    assert scheduler.running == [old]
    assert scheduler.waiting == [young, waiting]
    assert (young.num_computed, young.num_output_tokens, young.num_preemptions) == (0, 2, 1)
    assert scheduler.num_preemptions == 1
    while old in scheduler.running and old.num_tokens < 17:
        run_step(scheduler)
    scheduler.remove(old)
    assert run_step(scheduler)[0] == (1, 0, 9), "it is recomputed, its two output tokens included"


def test_an_older_prompt_takes_the_pages_of_a_younger_decode_planned_in_the_same_step() -> None:
    scheduler = make_scheduler(num_pages=9, rows=2, budget=2)
    old, young = make_sequence(0, 20), make_sequence(1, 5)
    scheduler.add(old)
    scheduler.add(young)
    steps = []
    while not young.num_preemptions:
        steps.append(run_step(scheduler))
    assert steps[-2][0][0] == young.id, "the younger was decoding until then"
    assert steps[-1] == [(0, old.num_computed - 1, 1)]
    assert (old.num_output_tokens, old.num_preemptions) == (0, 0)


def test_copies_planned_for_the_preempted_do_not_keep_pages_from_the_oldest() -> None:
    scheduler = make_scheduler(num_pages=12, rows=5, budget=16)
    sequences = [make_sequence(0, 41), make_sequence(1, 1)]
    for sequence in sequences:
        scheduler.add(sequence)

    def fork(parent: Sequence) -> Sequence:
        child = make_sequence(len(sequences), 1)
        child.token_ids, child.arrival = list(parent.token_ids), 1
        sequences.append(child)
        scheduler.fork(parent, child)
        return child

    def step_and_fork(*parents: Sequence) -> None:
        plan = scheduler.plan()
        scheduler.commit(plan)
        for sequence in [*plan.decodes, *(chunk.sequence for chunk in plan.prompts), *map(fork, parents)]:
            if sequence is not sequences[0]:
                sequence.append(7)
        scheduler.check_integrity()

    step_and_fork(sequences[1])
    step_and_fork(*sequences[1:3])  # their two pages are shared by two sequences each, and two pages are available
    assert scheduler.allocator.num_available == 2
    assert run_step(scheduler) == [(0, 29, 12)], "it needs three: the others go, with what was planned for them"
    assert [sequence.num_preemptions for sequence in sequences] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(("num_pages", "admitted"), [(10, True), (9, False)])
def test_a_prompt_is_admitted_when_it_fits_beside_what_running_prompts_still_need(num_pages, admitted) -> None:
    scheduler = make_scheduler(num_pages=num_pages)
    scheduler.add(make_sequence(0, 28))
    run_step(scheduler)  # 4 of its 7 pages
    second = make_sequence(1, 8)  # and a token more: 3 pages
    scheduler.add(second)
    run_step(scheduler)
    assert (second in scheduler.running) == admitted


def num_early(scheduler: Scheduler) -> int:
    """Pages that rows hold and the next step will not write to."""
    return sum(max(len(s.page_table) - -(-s.num_tokens // PAGE_SIZE), 0) for s in scheduler.decoding)


def run_crowd(seed: int) -> tuple[list[object], int, int]:
    """Joins, ends and aborts, chosen by the seed, over too few pages; what each step did, early pages, preemptions."""
    rng, scheduler = random.Random(seed), make_scheduler(num_pages=14, rows=5)
    steps: list[object] = []
    seen = 0
    for number in range(300):
        if rng.random() < 0.4 and len(scheduler.waiting) < 3:
            scheduler.add(make_sequence(number, rng.randint(1, 12), rng.randint(1, 30)))
        live = [*scheduler.running, *scheduler.waiting]
        if live and rng.random() < 0.1:
            victim = rng.choice(live)
            victim.finish_reason = FinishReason.ABORT
            scheduler.remove(victim)
            assert victim.page_table == []
        ran = run_step(scheduler)
        steps.append((ran, scheduler.num_preemptions, [sequence.id for sequence in scheduler.waiting]))
        seen += num_early(scheduler)
    while scheduler.running or scheduler.waiting:
        steps.append(run_step(scheduler))
    assert scheduler.allocator.num_free == 14
    return steps, seen, scheduler.num_preemptions


@pytest.mark.parametrize("seed", range(10))
def test_pages_that_rows_get_early_change_nothing_of_what_runs_when(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    expected, none, _ = run_crowd(seed)
    monkeypatch.setattr("cupyllm.scheduler.MOST_GROWING", 1)
    steps, seen, preemptions = run_crowd(seed)
    assert steps == expected
    assert none == 0
    assert min(seen, preemptions) >= 5, "there were early pages, and too few pages for all"


def scheduler_with_early_pages(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr("cupyllm.scheduler.MOST_GROWING", 1)
    scheduler = make_scheduler(rows=5)
    for sequence_id in range(4):
        scheduler.add(make_sequence(sequence_id, 1))
    while not num_early(scheduler):
        run_step(scheduler)
    return scheduler


def test_a_fork_of_a_row_with_an_early_page_is_copied_when_no_other_page_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = scheduler_with_early_pages(monkeypatch)
    while (parent := scheduler.decoding[0]).num_tokens % PAGE_SIZE or len(parent.page_table) * 4 == parent.num_tokens:
        run_step(scheduler)
    child = make_sequence(4, 1)
    child.token_ids, child.num_computed = list(parent.token_ids), parent.num_computed
    scheduler.fork(parent, child)
    rest = scheduler.allocator.allocate(scheduler.allocator.num_available)
    plan = scheduler.plan()
    assert len(plan.page_copies) == 2, "both write to a copy, in pages that rows had early"
    assert (scheduler.num_preemptions, plan.num_decodes) == (0, 5)
    scheduler.allocator.release(rest)
    scheduler.check_integrity()


def test_who_is_paused_lets_go_of_an_early_page(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_with_early_pages(monkeypatch)
    holder = next(s for s in scheduler.decoding if len(s.page_table) > -(-s.num_tokens // PAGE_SIZE))
    before = scheduler.allocator.num_free
    scheduler.pause(holder)
    assert scheduler.allocator.num_free == before + 1
    scheduler.check_integrity()


def test_no_early_pages_while_someone_waits_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_with_early_pages(monkeypatch)
    scheduler.add(make_sequence(9, 4 * 99))
    for _ in range(20):
        run_step(scheduler)
        assert num_early(scheduler) == 0
    assert len(scheduler.waiting) == 1


def test_no_more_sequences_run_than_the_two_batch_limits_allow() -> None:
    scheduler = make_scheduler(rows=3, prefills=2, budget=100)
    for sequence_id in range(6):
        scheduler.add(make_sequence(sequence_id, 2))
    assert [len(run_step(scheduler)) for _ in range(3)] == [2, 3, 3]
    assert len(scheduler.waiting) == 3


def test_full_pages_of_a_running_sequence_can_be_found_by_others() -> None:
    scheduler = make_scheduler()
    cache = scheduler.prefix_cache = PrefixCache(scheduler.allocator, page_size=PAGE_SIZE)
    scheduler.add(make_sequence(0, 6))
    found = []
    for _ in range(5):
        run_step(scheduler)
        found.append(len(cache.find([7] * 20)))
    assert found == [1, 1, 1, 2, 2], "the second page is full after three steps and published when the third is entered"


def test_all_that_a_paused_sequence_computed_is_published_when_it_leaves() -> None:
    scheduler = make_scheduler()
    cache = scheduler.prefix_cache = PrefixCache(scheduler.allocator, page_size=PAGE_SIZE)
    sequence = make_sequence(0, 7)
    scheduler.add(sequence)
    run_step(scheduler)
    scheduler.commit(scheduler.plan())  # the eighth token has run, and the sequence gets none after it
    scheduler.pause(sequence)
    scheduler.check_integrity()
    scheduler.remove(sequence)
    assert len(cache.find([7] * 20)) == 2


MISTAKES: dict[str, Callable[[Scheduler], object]] = {
    "a page that no table names": lambda s: s.allocator.allocate(1),
    "a cached page with one entry only": lambda s: s.prefix_cache._by_key.clear(),
    "more sequences than rows": lambda s: setattr(s, "max_decode_batch_size", 1),
    "a row that is another's": lambda s: setattr(s.decoding[0], "row", 1),
    "pages of a waiting one": lambda s: s.waiting[0].page_table.extend(s.allocator.allocate(1)),
    "computed tokens of a waiting one": lambda s: setattr(s.waiting[0], "num_computed", 1),
    "a row of a waiting one": lambda s: setattr(s.waiting[0], "row", 0),
    "the wrong order": lambda s: s.waiting.reverse(),
    "one that waits twice": lambda s: s.waiting.append(s.waiting[-1]),
    "a finished one that runs": lambda s: setattr(s.decoding[0], "finish_reason", FinishReason.LENGTH),
    "nothing left to compute": lambda s: setattr(s.decoding[0], "num_computed", s.decoding[0].num_tokens),
    "fewer pages than computed tokens": lambda s: setattr(s.prefilling[0], "num_computed", 29),
    "a page more than its tokens need": lambda s: s.decoding[0].page_table.extend(s.allocator.allocate(1)),
    "computed tokens without pages": lambda s: (
        s.allocator.release(s.prefilling[0].page_table) or setattr(s.prefilling[0], "page_table", [])
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_integrity_check_finds_a_mistake_in(mistake: str) -> None:
    scheduler = make_scheduler(rows=3, prefills=2, budget=16)
    scheduler.prefix_cache = PrefixCache(scheduler.allocator, page_size=PAGE_SIZE)
    for sequence_id, length in enumerate([4, 30, 4, 4]):
        scheduler.add(make_sequence(sequence_id, length))
    scheduler.max_decode_batch_size = 2
    run_step(scheduler)
    run_step(scheduler)
    assert [len(queue) for queue in (scheduler.decoding, scheduler.prefilling, scheduler.waiting)] == [1, 1, 2]
    scheduler.check_integrity()
    MISTAKES[mistake](scheduler)
    with pytest.raises(AssertionError):
        scheduler.check_integrity()


def test_budget_shares() -> None:
    assert share_budget([], 16) == []
    assert share_budget([10], 16) == [10]
    assert share_budget([100], 16) == [16]
    assert share_budget([100, 3], 16) == [13, 3]
    assert share_budget([100, 100, 3], 16) == [8, 8, 0]
    assert share_budget([5, 100, 3], 16) == [5, 11, 0]
    assert share_budget([5, 100], 0) == [0, 0]
    assert share_budget([5, 5], 1) == [1, 0]


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of add, step and abort, with a pool that is often too small for all."""

    NUM_PAGES, BUDGET, ROWS = 9, 12, 4
    LONGEST = NUM_PAGES * PAGE_SIZE

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(self.NUM_PAGES, rows=self.ROWS, prefills=2, budget=self.BUDGET)
        self.next_id = 0

    @property
    def live(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    @rule(prompt=st.integers(1, LONGEST - 1), output=st.integers(1, LONGEST))
    def add(self, prompt: int, output: int) -> None:
        self.scheduler.add(make_sequence(self.next_id, prompt, min(output, self.LONGEST - prompt)))
        self.next_id += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        sequence.finish_reason = FinishReason.ABORT
        self.scheduler.remove(sequence)
        assert sequence.page_table == []

    @rule()
    def step(self) -> None:
        had_work = bool(self.live)
        oldest = self.live[0] if self.live else None
        preemptions = oldest.num_preemptions if oldest else 0
        plan = self.scheduler.plan()
        chunks = plan.chunks
        assert bool(plan) == had_work, "a step with work runs something"
        assert plan.num_tokens <= self.BUDGET
        assert len({chunk.sequence.id for chunk in chunks}) == len(chunks)
        for place, chunk in enumerate(chunks):
            assert chunk.sequence in self.scheduler.running
            assert chunk.start == chunk.sequence.num_computed
            assert chunk.length >= 1
            assert len(chunk.sequence.page_table) * PAGE_SIZE >= chunk.start + chunk.length
            assert chunk.sequence.is_decoding == (place < plan.num_decodes)
        if oldest is not None:
            assert oldest.num_preemptions == preemptions, "the oldest is never preempted"
            assert any(chunk.sequence is oldest for chunk in chunks), "the oldest advances in every step"
        ended = [chunk.sequence for chunk in chunks if chunk.reaches_end]
        self.scheduler.commit(plan)
        for sequence in ended:
            if sequence.append(7) is not None:
                self.scheduler.remove(sequence)

    @invariant()
    def books_agree(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        for _ in range(40 * self.next_id + 1):
            if not self.live:
                break
            self.step()
        assert not self.live, "every sequence finishes"
        assert self.scheduler.allocator.num_free == self.NUM_PAGES


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestAnyOrderOfOperations = SchedulerMachine.TestCase
