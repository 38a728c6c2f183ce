"""Records of steps: applied to a snapshot they give the page map after every step, whatever happens to the pages."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from cupyllm.beam_search import BeamParams
from cupyllm.engine import Engine
from cupyllm.model import Model
from cupyllm.page_map import PageUse
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason, Sequence
from cupyllm.step_trace import StepRecord, StepTrace
from tests.engine_case import load_model, make_engine
from tests.tiny_checkpoint import write_tiny_checkpoint

PROMPT = list(range(1, 22))  # five full pages of 4 and one token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder)
    return load_model(folder)


class Watcher:
    """Listens to an engine, keeps the page map from the records, and holds it against the engine's own books."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.records: list[StepRecord] = []
        self.trace = StepTrace(engine)
        self.trace.listen(self.records.append)
        self.pages = {use.page: use for use in self.trace.snapshot().pages}
        self._num_applied = len(self.records)
        self.seen = {facts.id for facts in self.trace.snapshot().sequences}

    def apply_new(self) -> None:
        for record in self.records[self._num_applied :]:
            for use in record.page_changes:
                self.pages[use.page] = use
        self._num_applied = len(self.records)

    def check(self) -> None:
        self.apply_new()
        record = self.records[-1]
        assert record.decode_ids == () or set(record.decode_ids) <= self.seen | {f.id for f in record.started}
        self.seen |= {facts.id for facts in record.started}
        assert {page: use for page, use in self.pages.items() if use.state != "free"} == expected_pages(self.engine)
        stats = self.engine.stats
        assert record.num_live_pages == stats.num_live_pages
        assert record.num_cached_pages == stats.num_cached_pages
        assert record.num_free_pages == stats.num_free_pages
        assert record.num_waiting == stats.num_waiting

    def run_to_end(self) -> None:
        while self.engine.has_work:
            self.engine.step()
            self.check()


def expected_pages(engine: Engine) -> dict[int, PageUse]:
    """Every page that is not free, with its holders in no matter which order, read from the engine itself."""
    allocator, uses = engine.scheduler.allocator, {}
    for sequence in engine.scheduler.running:
        for place, page in enumerate(sequence.page_table):
            others = uses[page].holders if page in uses else ()
            uses[page] = PageUse(page, "live", place, (*others, sequence.id))
    for page in range(allocator.num_pages):
        if allocator.is_cached(page):
            uses[page] = PageUse(page, "cached", None, ())
    return {page: use._replace(holders=Holders(use.holders)) for page, use in uses.items()}


class Holders(tuple):  # type: ignore[type-arg]
    """Equal to any order of the same ids."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and sorted(self) == sorted(other)

    __hash__ = tuple.__hash__


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | settings))


@pytest.mark.parametrize("overlap", [False, True])
def test_records_tell_what_ran(model: Model, overlap: bool) -> None:
    engine = make_engine(model, num_pages=40, max_step_tokens=16, max_decode_batch_size=4, overlap=overlap)
    watcher = Watcher(engine)
    sequence = engine.add(PROMPT, params(max_tokens=3))
    watcher.run_to_end()
    records = watcher.records
    assert [record.number for record in records] == list(range(len(records)))
    assert [chunk for record in records for chunk in record.chunks] == [(sequence.id, 0, 16), (sequence.id, 16, 5)]
    assert [sequence_id for record in records for sequence_id in record.token_ids] == [sequence.id] * 3
    assert [row for record in records for row in record.decode_ids] == [sequence.id] * 2
    assert sum(record.num_tokens for record in records) == len(PROMPT) + 2
    assert [end for record in records for end in record.ended] == [(sequence.id, "length")]
    (facts,) = records[0].started
    assert facts[:4] == (sequence.id, len(PROMPT), 0, 0)
    assert facts.queued_at is not None
    assert facts.queued_at <= records[0].start_s <= records[0].start_s + records[0].seconds <= records[1].start_s


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_that_share_a_prompt_are_forks_over_the_same_pages(model: Model, overlap: bool) -> None:
    engine = make_engine(model, num_pages=60, max_decode_batch_size=8, overlap=overlap)
    watcher = Watcher(engine)
    sequences = engine.add_parallel(PROMPT, [params(seed=seed, temperature=1.0) for seed in range(4)])
    engine.step()
    watcher.check()
    first, *others = [sequence.id for sequence in sequences]
    assert watcher.records[0].forks == tuple((first, other) for other in others)
    shared = [use for use in watcher.pages.values() if len(use.holders) == 4]
    assert [use.place for use in sorted(shared, key=lambda use: use.page)] == [0, 1, 2, 3, 4, 5]
    engine.step()
    watcher.check()
    copies = watcher.records[1].page_copies  # each goes on in a copy of the last page
    assert len(copies) == 4
    assert {source for source, _ in copies} == {shared[-1].page}
    assert sum(len(use.holders) == 4 for use in watcher.pages.values()) == 5
    watcher.run_to_end()


def test_hits_of_the_prefix_cache_and_evictions(model: Model) -> None:
    engine = make_engine(model, num_pages=10, max_decode_batch_size=4)
    watcher = Watcher(engine)
    engine.add(PROMPT, params(max_tokens=2))
    watcher.run_to_end()
    assert sum(use.state == "cached" for use in watcher.pages.values()) == 5
    assert watcher.records[0].started[0].num_output_tokens == 0, "the token of its only chunk is not counted twice"
    again = engine.add(PROMPT, params(max_tokens=2))
    watcher.run_to_end()
    facts = next(facts for record in watcher.records for facts in record.started if facts.id == again.id)
    assert facts.num_cached_tokens == 20
    assert not any(record.evicted_pages for record in watcher.records)
    engine.add([90 + token for token in PROMPT], params(max_tokens=10))
    watcher.run_to_end()
    assert sum(len(record.evicted_pages) for record in watcher.records) == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_every_token_is_told_once(model: Model, overlap: bool) -> None:
    """Also those of steps that are like the one before, which are not looked at in full."""
    engine = make_engine(model, num_pages=200, max_decode_batch_size=8, overlap=overlap)
    watcher = Watcher(engine)
    sequences = [engine.add([*PROMPT, 30 + number], params(max_tokens=9 + 5 * number)) for number in range(4)]
    watcher.run_to_end()
    told = Counter(sequence_id for record in watcher.records for sequence_id in record.token_ids)
    assert told == {sequence.id: sequence.num_output_tokens for sequence in sequences}
    ran = Counter(sequence_id for record in watcher.records for sequence_id in record.decode_ids)
    assert ran == {sequence.id: sequence.num_output_tokens - 1 for sequence in sequences}
    ends = {end[0]: record.number for record in watcher.records for end in record.ended}
    assert sorted(ends) == [sequence.id for sequence in sequences]
    assert list(ends.values()) == sorted(ends.values())


def without_times(record: StepRecord) -> StepRecord:
    started = tuple(facts._replace(queued_at=None) for facts in record.started)
    return record._replace(start_s=0.0, seconds=0.0, started=started)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [24, 200], ids=["pages are short", "pages enough"])
@pytest.mark.parametrize("most_growing", [31, 1], ids=["pages when needed", "pages early"])
def test_a_record_made_in_short_is_that_made_in_full(
    model: Model, overlap: bool, num_pages: int, most_growing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines do the same, whatever comes; the steps of one are all looked at in full."""
    monkeypatch.setattr("cupyllm.scheduler.MOST_GROWING", most_growing)
    told: list[list[StepRecord]] = []
    in_short: list[StepRecord] = []
    real = StepTrace._record_like_last

    def noted(trace: StepTrace, *arguments: Any) -> StepRecord | None:
        record = real(trace, *arguments)
        in_short.extend([record] if record else [])
        return record

    for way in (noted, lambda trace, *arguments: None):
        monkeypatch.setattr(StepTrace, "_record_like_last", way)
        engine = make_engine(model, num_pages=num_pages, max_decode_batch_size=3, max_step_tokens=4, overlap=overlap)
        rng = Random(5)
        trace, records = StepTrace(engine), list[StepRecord]()
        trace.listen(records.append)
        alive: list[Sequence] = []
        for number in range(1500):
            if len(alive) < 5 and rng.random() < 0.08:
                prompt, most = [30 + number % 3, *PROMPT[: rng.randrange(20)]], rng.choice([1, 1, 20, 40])
                if rng.random() < 0.1:
                    engine.add_beams(prompt, BeamParams(beam_width=2, max_tokens=most))
                else:
                    alive += engine.add_parallel(prompt, [params(max_tokens=most)] * rng.choice([1, 1, 2]))
            if rng.random() < 0.06 and alive:
                engine.abort(alive[rng.randrange(len(alive))])
            if engine.has_work:
                engine.step()
            if rng.random() < 0.05:
                trace.note_changes()
            alive = [sequence for sequence in alive if sequence.finish_reason is None]
        told.append([without_times(record) for record in records])
    assert told[0] == told[1]
    assert len(in_short) > 150
    assert any(record.page_changes for record in in_short)


def test_pages_of_a_sequence_that_begins_and_ends_in_one_step_are_told(model: Model) -> None:
    engine = make_engine(model, num_pages=40)
    watcher = Watcher(engine)
    engine.add(PROMPT, params(max_tokens=1))
    watcher.run_to_end()
    assert len(watcher.records) == 1
    assert sum(use.state == "cached" for use in watcher.pages.values()) == 5


def test_preemptions(model: Model) -> None:
    engine = make_engine(model, num_pages=14, max_decode_batch_size=4)
    watcher = Watcher(engine)
    sequences = [engine.add([*PROMPT, 30 + number], params(max_tokens=20)) for number in range(2)]
    watcher.run_to_end()
    preempted = [sequence_id for record in watcher.records for sequence_id in record.preempted_ids]
    assert len(preempted) == engine.stats.num_preemptions > 0
    assert set(preempted) == {sequence.id for sequence in sequences if sequence.num_preemptions}


def test_beams(model: Model) -> None:
    engine = make_engine(model, num_pages=60, max_decode_batch_size=8)
    watcher = Watcher(engine)
    engine.add_beams(PROMPT, BeamParams(beam_width=3, max_tokens=6))
    watcher.run_to_end()
    started = {facts.id for record in watcher.records for facts in record.started}
    assert {sequence_id for record in watcher.records for sequence_id, _ in record.ended} == started
    assert any(record.forks for record in watcher.records)


def test_the_abort_of_one_that_waits_is_told_with_the_next_step(model: Model) -> None:
    engine = make_engine(model, num_pages=40, max_decode_batch_size=1)
    watcher = Watcher(engine)
    engine.add(PROMPT, params())
    waiting = engine.add(PROMPT, params())
    for _ in range(3):
        engine.step()
        watcher.check()
    engine.abort(waiting)
    engine.step()
    watcher.check()
    assert watcher.records[-1].ended == ((waiting.id, "abort"),)


def test_an_abort_while_nothing_runs_is_told_when_asked(model: Model) -> None:
    engine = make_engine(model, num_pages=40)
    watcher = Watcher(engine)
    sequence = engine.add(PROMPT, params())
    engine.step()
    engine.abort(sequence)
    watcher.trace.note_changes()
    watcher.check()
    assert watcher.records[-1].ended == ((sequence.id, "abort"),)
    before = len(watcher.records)
    watcher.trace.note_changes()
    assert len(watcher.records) == before


def test_pages_of_a_failed_sequence_leave_the_cache(model: Model) -> None:
    engine = make_engine(model, num_pages=40)
    watcher = Watcher(engine)
    engine.add(PROMPT, params(max_tokens=2))
    watcher.run_to_end()
    failing = engine.add(PROMPT, params())
    engine.step()
    engine.abort(failing, FinishReason.ERROR)
    watcher.trace.note_changes()
    watcher.check()
    assert not any(use.state == "cached" for use in watcher.pages.values())


def test_who_comes_late_gets_a_snapshot_and_nothing_is_watched_when_all_have_left(model: Model) -> None:
    engine = make_engine(model, num_pages=40)
    sequence = engine.add(PROMPT, params(max_tokens=20))
    engine.step()
    engine.step()
    on_reuse = engine.scheduler.allocator.on_reuse
    watcher = Watcher(engine)
    snapshot = watcher.trace.snapshot()
    assert [facts.id for facts in snapshot.sequences] == [sequence.id]
    assert {use.holders for use in snapshot.pages} == {(sequence.id,)}
    engine.step()
    watcher.check()
    watcher.trace.unlisten(watcher.records.append)
    assert engine.observer is None
    assert engine.scheduler.allocator.on_reuse == on_reuse
    before = len(watcher.records)
    engine.step()
    assert len(watcher.records) == before
