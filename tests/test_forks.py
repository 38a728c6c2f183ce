"""Several answers to one prompt: computed once, pages shared, copied when written, each as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.engine import Engine
from cupyllm.errors import QueueFullError
from cupyllm.model import Model
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason
from tests.engine_case import load_model, make_engine, run_to_end
from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_tiny_checkpoint(tmp_path_factory.mktemp("forks") / "model"))


def seeded(count: int, **more) -> list[SamplingParams]:
    return [SamplingParams(temperature=1.0, seed=s, max_tokens=10, ignore_eos=True, **more) for s in range(count)]


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 500, length).tolist()


def alone(model: Model, ids: list[int], params: SamplingParams) -> list[int]:
    engine = make_engine(model)
    sequence = engine.add(ids, params)
    run_to_end(engine)
    return sequence.output_ids


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_each_answer_is_what_it_would_be_alone(model: Model, length: int, prefix_cache: bool) -> None:
    engine = make_engine(model, prefix_cache=prefix_cache)
    sequences = engine.add_parallel(prompt(length), seeded(4))
    run_to_end(engine)
    for sequence, params in zip(sequences, seeded(4), strict=True):
        assert sequence.output_ids == alone(model, prompt(length), params)
    assert len({tuple(sequence.output_ids) for sequence in sequences}) > 1


def test_the_prompt_is_computed_once_and_its_full_pages_are_held_by_all(model: Model) -> None:
    engine = make_engine(model)
    sequences = engine.add_parallel(prompt(10), seeded(3))
    assert len(list(engine.step())) == 3, "one pass over the prompt gives every answer its first token"
    tables = [sequence.page_table for sequence in sequences]
    assert tables[0] == tables[1] == tables[2]
    assert engine.stats.num_live_pages == 3
    engine.step()
    tables = [sequence.page_table for sequence in sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3, "the page that is written to is everybody's own"
    assert engine.stats.num_live_pages == 5
    engine.scheduler.check_integrity()


def test_more_answers_than_rows_and_pages_still_all_come(model: Model) -> None:
    engine = make_engine(model, num_pages=9, max_decode_batch_size=3)
    sequences = engine.add_parallel(prompt(9), seeded(6))
    run_to_end(engine)
    for sequence, params in zip(sequences, seeded(6), strict=True):
        assert sequence.output_ids == alone(model, prompt(9), params)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_aborting_one_answer_leaves_the_others(model: Model, victim: int, steps_before: int) -> None:
    engine: Engine = make_engine(model, max_step_tokens=32)
    sequences = engine.add_parallel(prompt(40), seeded(3))
    for _ in range(steps_before):
        engine.step()
    engine.abort(sequences[victim])
    engine.scheduler.check_integrity()
    run_to_end(engine)
    for number, (sequence, params) in enumerate(zip(sequences, seeded(3), strict=True)):
        if number == victim:
            assert sequence.finish_reason is FinishReason.ABORT
        else:
            assert sequence.output_ids == alone(model, prompt(40), params)


def test_waiting_answers_count_and_all_end_together(model: Model) -> None:
    engine = make_engine(model, max_waiting=4)
    engine.add_parallel(prompt(5), seeded(3))
    assert engine.stats.num_waiting == 3
    with pytest.raises(QueueFullError):
        engine.add_parallel(prompt(5), seeded(2))
    assert engine.stats.num_waiting == 3
    assert len(engine.abort_all()) == 3
    assert not engine.has_work
    assert engine.stats.num_waiting == 0


def test_a_lower_priority_number_goes_first_and_ties_go_by_arrival(model: Model) -> None:
    engine = make_engine(model, max_decode_batch_size=1)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    order = {engine.add([1, 2], one, priority=p).id: p for p in (5, 0, 5, -3, 0)}
    ended = [event.sequence.id for event in run_to_end(engine)]
    assert [(order[i], i) for i in ended] == sorted((p, i) for i, p in order.items())
