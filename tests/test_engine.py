"""The engine over a real (random, tiny) model: what changes the schedule never changes an answer."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cupyllm.engine import Engine
from cupyllm.errors import ContextLengthError, QueueFullError, RequestError
from cupyllm.model import Model
from cupyllm.model_config import GenerationDefaults
from cupyllm.ops.reference import ReferenceOps
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason
from cupyllm.step_result import TokenEvent
from tests.engine_case import load_model, make_engine, run_to_end
from tests.tiny_checkpoint import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, top_p=0.95)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=12, ignore_eos=True, logprobs=3)
COUNTED = SamplingParams(
    temperature=0.7, seed=3, presence_penalty=0.5, frequency_penalty=0.8, min_tokens=6, max_tokens=12, logit_bias={5: 4}
)
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalised with logprobs": PENALISED, "counted": COUNTED}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_tiny_checkpoint(tmp_path_factory.mktemp("engine") / "model"))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 500, rng.integers(1, 30)).tolist() for _ in range(count)]


def answer(model: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    engine = make_engine(model)
    sequence = engine.add(prompt, params)
    run_to_end(engine)
    return sequence.output_ids


def logprobs_of(events: list[TokenEvent]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for event in events:
        assert event.logprobs is not None
        found.setdefault(event.sequence.id, []).append(event.logprobs)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "switches",
    [
        {"max_step_tokens": 4, "max_decode_batch_size": 4},
        {"max_step_tokens": 9, "max_decode_batch_size": 2},
        {"max_step_tokens": 512, "page_size": 1},
        {"max_step_tokens": 512, "page_size": 16},
        {"max_prefill_batch_size": 1},
        {"num_pages": 12, "max_decode_batch_size": 8, "max_step_tokens": 16},
        {"num_pages": 12, "max_decode_batch_size": 8, "max_step_tokens": 16, "prefix_cache": False},
        {"prefix_cache": False},
        {"overlap": True},
        {"overlap": True, "num_pages": 12, "max_decode_batch_size": 8, "max_step_tokens": 16},
        {"overlap": True, "page_size": 1, "max_step_tokens": 9, "max_decode_batch_size": 2},
    ],
    ids=[
        "chunks of 4",
        "two rows",
        "pages of 1",
        "pages of 16",
        "one prompt a step",
        "pool too small",
        "pool too small, nothing reused",
        "nothing reused",
        "tokens read late",
        "tokens read late, pool too small",
        "tokens read late, pages of 1",
    ],
)
def test_no_switch_changes_an_answer(model: Model, kind: str, switches: dict[str, Any]) -> None:
    params, asked = KINDS[kind], prompts(6)
    engine = make_engine(model, **switches)
    sequences = [engine.add(prompt, params) for prompt in asked]
    run_to_end(engine)
    for sequence, prompt in zip(sequences, asked, strict=True):
        assert sequence.output_ids == answer(model, prompt, params)
    if switches.get("num_pages"):
        assert engine.stats.num_preemptions > 0, "a pool this small must preempt, or the case is void"


def test_preemption_repeats_no_event_and_keeps_logprobs(model: Model) -> None:
    asked = prompts(8, seed=3)
    tight, roomy = make_engine(model, num_pages=12), make_engine(model)
    for engine in (tight, roomy):
        for prompt in asked:
            engine.add(prompt, PENALISED)
    tight_events, roomy_events = run_to_end(tight), run_to_end(roomy)
    assert tight.stats.num_preemptions > 0
    assert len(tight_events) == len(roomy_events) == 8 * 12
    expected = logprobs_of(roomy_events)
    for sequence_id, found in logprobs_of(tight_events).items():
        for one, other in zip(found, expected[sequence_id], strict=True):
            np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("delay", range(4))
def test_a_seeded_request_gives_the_same_tokens_whenever_it_arrives_among_others(model: Model, delay: int) -> None:
    prompt, *others = prompts(8, seed=5)
    engine = make_engine(model)
    for other in others:
        engine.add(other, SamplingParams(temperature=1.0, max_tokens=20))
    for _ in range(delay):
        engine.step()
    sequence = engine.add(prompt, SEEDED)
    run_to_end(engine)
    assert sequence.output_ids == answer(model, prompt, SEEDED)


def test_requests_without_a_seed_differ_and_the_config_seed_repeats_them(model: Model) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)

    def run(seed: int | None) -> list[list[int]]:
        engine = make_engine(model, seed=seed)
        sequences = [engine.add([1, 2, 3], hot) for _ in range(8)]
        run_to_end(engine)
        return [sequence.output_ids for sequence in sequences]

    unseeded = run(None)
    assert len({tuple(ids) for ids in unseeded}) > 4
    assert run(11) == run(11)
    assert run(11) != unseeded


def test_random_arrivals_and_aborts_lose_and_cross_nothing(model: Model) -> None:
    rng = random.Random(0)
    engine = make_engine(model, num_pages=30, max_decode_batch_size=5, max_step_tokens=13)
    asked = prompts(40, seed=9)
    waiting, live, aborted = list(enumerate(asked)), {}, set()
    tokens: dict[int, list[int]] = {}
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            index, prompt = waiting.pop()
            live[index] = engine.add(prompt, GREEDY)
        if live and rng.random() < 0.08:
            victim = rng.choice([index for index in live if live[index].finish_reason is None] or [None])
            if victim is not None:
                engine.abort(live[victim])
                aborted.add(victim)
        for event in engine.step():
            assert event.sequence.finish_reason is not FinishReason.ABORT
            tokens.setdefault(event.sequence.id, []).append(event.token_id)
        engine.scheduler.check_integrity()
    assert engine.stats.num_cached_pages + engine.stats.num_free_pages == 30
    assert 2 <= len(aborted) <= 30
    for index, sequence in live.items():
        expected = answer(model, asked[index], GREEDY)
        got = tokens.get(sequence.id, [])
        assert got == expected[: len(got)]
        assert (len(got) == len(expected)) or index in aborted


def test_an_end_token_stops_and_ignore_eos_does_not(model: Model) -> None:
    free_run = answer(model, [5, 6, 7], GREEDY)
    end = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(free_run[3],))
    engine = make_engine(model)
    sequence = engine.add([5, 6, 7], end)
    events = run_to_end(engine)
    first = free_run.index(free_run[3])
    assert sequence.output_ids == free_run[: first + 1]
    assert [event.finish_reason for event in events] == [None] * first + [FinishReason.STOP]
    assert len(free_run) == 12


def test_both_end_tokens_of_the_checkpoint_end_a_sequence(model: Model) -> None:
    engine = make_engine(model)
    sequence = engine.add([1], SamplingParams())
    assert sequence.end_token_ids == {510, 511}, "the union of config.json and generation_config.json"
    assert engine.add([1], SamplingParams(ignore_eos=True)).end_token_ids == frozenset()


def test_defaults_fill_what_a_request_leaves_out(model: Model) -> None:
    defaults = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1)
    engine = make_engine(model, defaults=defaults)
    params = engine.add([1], SamplingParams(top_p=0.5, temperature=0.0)).params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.0, 20, 0.5, 1.1)


@pytest.mark.parametrize("length", [39, 40, 41])
def test_a_prompt_that_fills_the_context(model: Model, length: int) -> None:
    engine = make_engine(model, max_model_len=40)
    if length == 39:
        sequence = engine.add([1] * 39, SamplingParams(ignore_eos=True))
        run_to_end(engine)
        assert (sequence.num_output_tokens, sequence.finish_reason) == (1, FinishReason.LENGTH)
    else:
        with pytest.raises(ContextLengthError, match=rf"holds 40 tokens, but {length + 1}.*{length} in the prompt"):
            engine.add([1] * length, SamplingParams())


def test_the_longest_sequence_fits_a_pool_of_exactly_its_size(model: Model) -> None:
    engine = make_engine(model, num_pages=8, page_size=4)
    assert engine.max_model_len == 32
    sequence = engine.add([3] * 20, SamplingParams(ignore_eos=True))
    other = engine.add([3] * 2, GREEDY)
    run_to_end(engine)
    assert (sequence.num_tokens, sequence.finish_reason) == (32, FinishReason.LENGTH)
    assert other.num_output_tokens == 12


@pytest.mark.parametrize("length", [29, 31, 32])
def test_a_prompt_that_no_page_is_left_for_does_not_hold_up_the_next(model: Model, length: int) -> None:
    """In a pool of 8 pages of 4: 7B+1 and 8B-1 tokens run, 8B leave no room for a token; a short one runs at once."""
    engine = make_engine(model, num_pages=8, page_size=4)
    if length == 32:
        with pytest.raises(ContextLengthError, match="holds 32 tokens, but 33"):
            engine.add([3] * length, SamplingParams())
    else:
        engine.add([3] * length, SamplingParams(max_tokens=1))
    short = engine.add([5], SamplingParams(max_tokens=3, ignore_eos=True))
    events = run_to_end(engine)
    assert [event.finish_reason for event in events if event.sequence is not short] == ["length"] * (length < 32)
    assert short.output_ids == answer(model, [5], SamplingParams(max_tokens=3, ignore_eos=True))


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([0, 512], {}, "prompt"),
        ([2**63], {}, "prompt"),
        ([1], {"stop_token_ids": (512,)}, "stop_token_ids"),
        ([1], {"max_tokens": 4000}, "prompt"),
        ([1], {"max_tokens": 10**18}, "prompt"),
    ],
)
def test_what_can_never_be_served_is_refused_and_changes_nothing(model: Model, prompt, params, param: str) -> None:
    engine = make_engine(model)
    with pytest.raises(RequestError) as caught:
        engine.add(prompt, SamplingParams(**params))
    assert caught.value.param == param
    assert not engine.has_work


def test_a_full_queue_is_said_and_empties_again(model: Model) -> None:
    engine = make_engine(model, max_waiting=2)
    engine.add([1], GREEDY)
    engine.add([1], GREEDY)
    with pytest.raises(QueueFullError, match="max_waiting"):
        engine.add([1], GREEDY)
    engine.step()
    engine.add([1], GREEDY)
    run_to_end(engine)


class PoisonedOps(ReferenceOps):
    """Makes the logits of one row NaN, or fails, in one step."""

    def __init__(self, step: int, *, fail: bool = False) -> None:
        self.step, self.fail = step, fail

    def logits(self, x, head, *, rows, norm):  # type: ignore[no-untyped-def]
        self.step -= 1
        if self.step == 0 and self.fail:
            raise MemoryError("no memory in this step")
        logits = super().logits(x, head, rows=rows, norm=norm)
        if self.step == 0:
            logits[1] = np.nan
        return logits


def test_a_row_of_nan_ends_its_own_sequence_only(model: Model) -> None:
    engine = make_engine(model, ops=PoisonedOps(step=4))
    asked = prompts(3, seed=2)
    sequences = [engine.add(prompt, GREEDY) for prompt in asked]
    events = run_to_end(engine)
    assert sequences[1].finish_reason is FinishReason.ERROR
    assert [event.token_id for event in events if event.sequence is sequences[1]][-1] is None
    for index in (0, 2):
        assert sequences[index].output_ids == answer(model, asked[index], GREEDY)


def test_after_a_failed_step_everything_is_ended_and_the_next_request_is_right(model: Model) -> None:
    engine = make_engine(model, ops=PoisonedOps(step=3, fail=True))
    asked = prompts(4, seed=4)
    for prompt in asked:
        engine.add(prompt, GREEDY)
    with pytest.raises(MemoryError):
        run_to_end(engine)
    ended = engine.abort_all()
    assert [sequence.finish_reason for sequence in ended] == [FinishReason.ERROR] * 4
    engine.scheduler.check_integrity()
    assert engine.stats.num_live_pages == 0
    sequence = engine.add(asked[0], GREEDY)
    run_to_end(engine)
    assert sequence.output_ids == answer(model, asked[0], GREEDY)


def test_aborting_twice_or_after_the_end_does_nothing(model: Model) -> None:
    engine: Engine = make_engine(model)
    sequence = engine.add([1, 2], GREEDY)
    engine.step()
    engine.abort(sequence)
    engine.abort(sequence)
    assert sequence.finish_reason is FinishReason.ABORT
    assert not engine.has_work
    finished = engine.add([1, 2], GREEDY)
    run_to_end(engine)
    engine.abort(finished)
    assert finished.finish_reason is FinishReason.LENGTH
