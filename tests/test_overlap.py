"""Tokens read a step late: the same answers, one token in vain at most, and nothing lost when something ends or fails.

The device of these tests computes at once, so that only the order of work differs; whoever looked at a token before it
was read would see PENDING.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupyllm.beam_search import BeamParams
from cupyllm.engine import Engine
from cupyllm.model import Model
from cupyllm.ops.reference import ReferenceOps
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import PENDING, FinishReason, Sequence
from tests.engine_case import load_model, make_engine, run_to_end
from tests.tiny_checkpoint import write_tiny_checkpoint

LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_tiny_checkpoint(tmp_path_factory.mktemp("overlap") / "model"))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 500, rng.integers(1, 30)).tolist() for _ in range(count)]


class CountingOps(ReferenceOps):
    """Counts the rows that are sampled."""

    num_rows = 0

    def sample(self, logits: Any, sampling: Any) -> Any:
        self.num_rows += len(logits)
        return super().sample(logits, sampling)


def test_a_step_gives_the_tokens_of_the_step_before(model: Model) -> None:
    late, at_once = make_engine(model, overlap=True), make_engine(model, overlap=False)
    for engine in (late, at_once):
        engine.add(prompts(1)[0], LONG)
    assert list(late.step()) == []
    for _ in range(5):
        assert [event.token_id for event in late.step()] == [event.token_id for event in at_once.step()]


@pytest.mark.parametrize("switches", [{}, {"num_pages": 14, "max_step_tokens": 9, "max_decode_batch_size": 8}])
def test_an_answer_that_ends_by_length_costs_no_row_and_one_that_stops_costs_one(
    model: Model, switches: dict[str, Any]
) -> None:
    engine, ops = make_engine(model, **switches), CountingOps()
    answers = [engine.add(prompt, LONG) for prompt in prompts(6)]
    run_to_end(engine)
    stops = [SamplingParams(temperature=0.0, stop_token_ids=(one.output_ids[9],), max_tokens=30) for one in answers]
    engine = make_engine(model, ops=ops, overlap=True, **switches)
    by_length = [engine.add(prompt, LONG) for prompt in prompts(6)]
    run_to_end(engine)
    assert [sequence.output_ids for sequence in by_length] == [sequence.output_ids for sequence in answers]
    assert ops.num_rows == 6 * 30
    ops.num_rows = 0
    stopped = [engine.add(prompt, params) for prompt, params in zip(prompts(6), stops, strict=True)]
    run_to_end(engine)
    for sequence, answer in zip(stopped, answers, strict=True):
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.output_ids == answer.output_ids[: answer.output_ids.index(answer.output_ids[9]) + 1]
    assert ops.num_rows <= sum(sequence.num_output_tokens for sequence in stopped) + 6


def mixed(engine: Engine, seed: int) -> list[Any]:
    """Requests of every kind: greedy, seeded, penalised, forked, guided, read, embedded, beams."""
    rng, asked = random.Random(seed), []
    for number, prompt in enumerate(prompts(12, seed)):
        common: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "ignore_eos": rng.random() < 0.5, "logprobs": 1}
        seeded = SamplingParams(temperature=1.0, seed=number, **common)
        kinds = [
            lambda p=prompt, c=common: [engine.add(p, SamplingParams(temperature=0.0, **c))],
            lambda p=prompt, s=seeded: engine.add_parallel(p, s.split() + s.split()),
            lambda p=prompt, c=common: [engine.add(p, SamplingParams(seed=3, frequency_penalty=1.0, **c))],
            lambda p=prompt, c=common: [engine.add(p, SamplingParams(allowed_token_ids=(5, 6, 7), seed=1, **c))],
            lambda p=prompt: [engine.add(p, SamplingParams(max_tokens=0, prompt_logprobs=1))],
            lambda p=prompt: [engine.add_beams(p, BeamParams(beam_width=2, max_tokens=5))],
        ]
        asked += kinds[number % len(kinds) if seed % 2 else rng.randrange(5)]()
    return asked


def result_of(asked: Any) -> Any:
    if isinstance(asked, Sequence):
        assert PENDING not in asked.token_ids
        return asked.output_ids, asked.finish_reason
    return [(beam.token_ids, beam.ended) for beam in asked.finished]


@pytest.mark.parametrize(
    "switches", [{}, {"num_pages": 12, "max_step_tokens": 16, "max_decode_batch_size": 8}, {"page_size": 1}]
)
def test_every_kind_of_request_gets_what_it_gets_at_once(model: Model, switches: dict[str, Any]) -> None:
    num_preemptions = 0
    for seed in range(8):
        late, at_once = (make_engine(model, overlap=overlap, **switches) for overlap in (True, False))
        asked = [mixed(engine, seed) for engine in (late, at_once)]
        late_events, events = run_to_end(late), run_to_end(at_once)
        assert [result_of(one) for one in asked[0]] == [result_of(one) for one in asked[1]]
        assert len(late_events) == len(events)
        num_preemptions += late.stats.num_preemptions
    assert bool(num_preemptions) == ("num_pages" in switches)


def test_of_two_tokens_in_one_step_only_the_last_ends_the_answer(model: Model) -> None:
    engine = make_engine(model, overlap=True)
    short = engine.add(prompts(1)[0], replace(LONG, max_tokens=4))
    events = [event for _ in range(3) for event in engine.step()]
    engine.add(prompts(2)[1], replace(LONG, presence_penalty=1.0))  # its tokens must be known at once
    events += [event for event in engine.step() if event.sequence is short]
    assert [event.token_id for event in events] == short.output_ids
    assert [event.finish_reason for event in events] == [None, None, None, FinishReason.LENGTH]


@pytest.mark.parametrize("which", [0, 1])
def test_a_prompt_that_was_read_can_be_aborted_before_that_is_told(model: Model, which: int) -> None:
    engine = make_engine(model, overlap=True)
    asked = engine.add_parallel(prompts(1)[0], [SamplingParams(max_tokens=0)] * 2)
    assert list(engine.step()) == []
    engine.abort(asked[which])
    assert [event.sequence for event in run_to_end(engine)] == [asked[1 - which]]
    assert asked[which].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("seed", range(8))
def test_aborts_at_any_moment_leave_the_others_as_they_are(model: Model, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(model, overlap=True, num_pages=20, max_step_tokens=16, max_decode_batch_size=6)
    alone = make_engine(model)
    asked = prompts(8, seed)
    sequences = [engine.add(prompt, LONG) for prompt in asked]
    doomed = set(rng.sample(range(8), 4))
    moments = {number: rng.randint(0, 25) for number in doomed}
    seen: dict[int, list[int | None]] = {}
    for step in range(10_000):
        for number in [number for number, moment in moments.items() if moment == step]:
            engine.abort(sequences[number])
        if not engine.has_work:
            break
        for event in engine.step():
            seen.setdefault(event.sequence.id, []).append(event.token_id)
            assert event.sequence.id not in {sequences[n].id for n in doomed if moments[n] < step}
        engine.scheduler.check_integrity()
    assert engine.stats.num_live_pages == 0
    for number in set(range(8)) - doomed:
        one = alone.add(asked[number], LONG)
        run_to_end(alone)
        assert sequences[number].output_ids == one.output_ids == seen[sequences[number].id]


def test_a_row_that_fails_is_known_a_step_late_and_fails_alone(model: Model) -> None:
    class FailsOnce(ReferenceOps):
        num_samples = 0

        def sample(self, logits: Any, sampling: Any) -> Any:
            self.num_samples += 1
            if self.num_samples == 4:
                logits = np.array(logits)
                logits[0] = np.nan
            return super().sample(logits, sampling)

    engine = make_engine(model, overlap=True, ops=FailsOnce())
    failing, fine = (engine.add(prompt, LONG) for prompt in prompts(2))
    events = run_to_end(engine)
    assert (failing.finish_reason, fine.num_output_tokens) == (FinishReason.ERROR, 30)
    assert [event.token_id for event in events if event.sequence is failing][-1] is None
    assert engine.stats.num_live_pages == 0


def test_a_step_that_raises_leaves_nothing_behind(model: Model) -> None:
    class Raises(ReferenceOps):
        num_samples = 0

        def sample(self, logits: Any, sampling: Any) -> Any:
            self.num_samples += 1
            if self.num_samples in (2, 5):
                raise RuntimeError("planted")
            return super().sample(logits, sampling)

    engine = make_engine(model, overlap=True, ops=Raises())
    for _ in range(2):
        short = engine.add(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=1))
        sequence = engine.add(prompts(2)[1], LONG)
        engine.step()
        with pytest.raises(RuntimeError):
            run_to_end(engine)
        engine.abort_all()
        assert not engine.has_work
        assert engine.stats.num_live_pages == 0
        assert None not in (short.finish_reason, sequence.finish_reason)
    again = engine.add(prompts(1)[0], LONG)
    run_to_end(engine)
    assert again.num_output_tokens == 30


def test_a_full_page_is_reused_only_with_the_tokens_that_it_holds(model: Model) -> None:
    engine, plain = make_engine(model, overlap=True), make_engine(model, prefix_cache=False)
    (prompt,) = prompts(1)
    first = engine.add(prompt, LONG)
    run_to_end(engine)
    again = engine.add(first.token_ids, LONG)
    expected = plain.add(first.token_ids, LONG)
    run_to_end(engine)
    run_to_end(plain)
    assert again.num_cached_tokens is not None
    assert again.num_cached_tokens >= len(first.token_ids) - 1 - 4
    assert again.output_ids == expected.output_ids
