"""What is read out of prompts, and sequences that only read: the same whatever the schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyllm.batch import BatchBuilder
from cupyllm.engine import Engine
from cupyllm.errors import ContextLengthError, RequestError
from cupyllm.model import Model, forward, logits
from cupyllm.sampling import SamplingParams
from cupyllm.sampling_batch import TokenLogprobs
from cupyllm.sequence import FinishReason, Sequence
from cupyllm.token_guide import AllowedIds
from tests.engine_case import load_model, make_engine, run_to_end
from tests.tiny_checkpoint import write_tiny_checkpoint

PROMPT = np.random.default_rng(5).integers(0, 500, 37).tolist()
READ = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
SWITCHES: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 5, "max_decode_batch_size": 4},
    {"prefix_cache": False, "page_size": 1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_tiny_checkpoint(tmp_path_factory.mktemp("readout") / "model"))


def hidden_states(model: Model, ids: list[int]) -> tuple[Engine, np.ndarray]:
    """The hidden states of a prompt run at once."""
    engine = make_engine(model)
    engine.add(ids, READ)
    batch = BatchBuilder(engine.runner.cache.page_size).build(engine.scheduler.plan())
    return engine, forward(engine.ops, model, engine.runner.cache, batch)


def prompt_logprobs(engine: Engine, ids: list[int], params: SamplingParams = READ) -> list[TokenLogprobs | None]:
    sequence = engine.add(ids, params)
    run_to_end(engine)
    assert sequence.readout is not None
    return sequence.readout.logprobs


def assert_equal(found: list[TokenLogprobs | None], expected: list[TokenLogprobs | None]) -> None:
    assert len(found) == len(expected)
    assert found[0] is expected[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one is not None
        assert other is not None
        np.testing.assert_allclose(one.logprob, other.logprob, atol=1e-4)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


@pytest.mark.parametrize("switches", SWITCHES)
def test_prompt_logprobs_are_those_of_the_whole_prompt_run_at_once(model: Model, switches: dict[str, Any]) -> None:
    engine, hidden = hidden_states(model, PROMPT)
    scores = logits(engine.ops, model, hidden, np.arange(len(PROMPT), dtype=np.int32)).astype(np.float64)
    all_logprobs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    found = prompt_logprobs(make_engine(model, **switches), PROMPT)
    assert len(found) == len(PROMPT)
    assert found[0] is None
    for place, one in enumerate(found[1:], start=1):
        assert one is not None
        np.testing.assert_allclose(one.logprob, all_logprobs[place - 1, PROMPT[place]], atol=1e-4)
        assert [token_id for token_id, _ in one.top] == np.argsort(-all_logprobs[place - 1])[:2].tolist()


def test_a_cached_prompt_is_read_all_the_same_and_a_prompt_longer_than_a_slice_of_logits(model: Model) -> None:
    long = np.random.default_rng(6).integers(0, 500, 150).tolist()
    engine = make_engine(model)
    first = prompt_logprobs(engine, long)
    assert engine.stats.num_cached_pages > 0
    assert_equal(prompt_logprobs(engine, long), first)
    plain = engine.add(long, SamplingParams(temperature=0.0, max_tokens=1))
    run_to_end(engine)
    assert plain.num_cached_tokens == 148, "what was read has filled the cache for others"


def test_preemption_reads_nothing_twice(model: Model) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=2, ignore_eos=True)
    asked = [PROMPT[k : k + 15] for k in range(8)]
    tight = make_engine(model, num_pages=12, max_step_tokens=8, max_decode_batch_size=8)
    sequences = [tight.add(ids, params) for ids in asked]
    run_to_end(tight)
    assert tight.stats.num_preemptions > 0
    for ids, sequence in zip(asked, sequences, strict=True):
        assert sequence.readout is not None
        assert_equal(sequence.readout.logprobs, prompt_logprobs(make_engine(model), ids, params))


def test_several_answers_share_what_is_read_also_when_the_first_is_aborted(model: Model) -> None:
    engine = make_engine(model, max_step_tokens=5, max_decode_batch_size=4)
    params = SamplingParams(temperature=1.0, max_tokens=3, prompt_logprobs=2)
    first, second = engine.add_parallel(PROMPT, [params, params])
    engine.step()
    engine.abort(first)
    run_to_end(engine)
    assert second.readout is not None
    assert_equal(second.readout.logprobs, prompt_logprobs(make_engine(model), PROMPT))


def test_a_sequence_that_only_reads_ends_without_a_token(model: Model) -> None:
    engine = make_engine(model, num_pages=len(PROMPT), page_size=1)  # no page for one more token
    sequence = engine.add(PROMPT, SamplingParams(max_tokens=0))
    (event,) = run_to_end(engine)
    assert (event.sequence, event.token_id, event.finish_reason) == (sequence, None, FinishReason.LENGTH)
    assert sequence.output_ids == []


def test_several_sequences_that_only_read_one_prompt_all_end(model: Model) -> None:
    engine = make_engine(model)
    sequences = engine.add_parallel(PROMPT, [SamplingParams(max_tokens=0)] * 3)
    assert [event.sequence for event in run_to_end(engine)] == sequences
    assert [sequence.finish_reason for sequence in sequences] == [FinishReason.LENGTH] * 3


def test_reading_and_decoding_sequences_share_steps(model: Model) -> None:
    engine = make_engine(model)
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = engine.add(PROMPT[:9], asked)
    run_to_end(engine)
    sequences: list[Sequence] = []
    for k in range(3):
        sequences += engine.add_parallel(PROMPT[:9], [asked] * (k + 1))
        engine.add(PROMPT[k:], READ)
        engine.add_embedding(PROMPT[k:], "mean")
        engine.step()
    run_to_end(engine)
    assert [sequence.output_ids for sequence in sequences] == [alone.output_ids] * 6


@pytest.mark.parametrize("switches", SWITCHES)
def test_an_embedding_is_the_last_or_the_mean_hidden_state(model: Model, switches: dict[str, Any]) -> None:
    _, hidden = hidden_states(model, PROMPT)
    hidden = hidden.astype(np.float64)
    norm = np.sqrt((hidden**2).mean(axis=1, keepdims=True) + model.config.rms_norm_eps)
    states = hidden / norm * model.weights.final_norm
    engine = make_engine(model, **switches)
    last, mean = engine.add_embedding(PROMPT, "last"), engine.add_embedding(PROMPT, "mean")
    run_to_end(engine)
    assert last.readout is not None
    assert mean.readout is not None
    np.testing.assert_allclose(last.readout.embedding, states[-1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mean.readout.embedding, states.mean(axis=0), rtol=1e-4, atol=1e-4)


def test_a_prompt_that_fills_the_context_can_be_read_and_not_continued(model: Model) -> None:
    engine = make_engine(model, num_pages=4, page_size=8)
    assert len(prompt_logprobs(engine, PROMPT[:32])) == 32
    with pytest.raises(ContextLengthError):
        engine.add(PROMPT[:33], READ)
    with pytest.raises(ContextLengthError):
        engine.add(PROMPT[:32], SamplingParams(max_tokens=1))


class Countdown:
    """Allows 3, then 2, then 1, then the end token; breaks when told to."""

    def __init__(self, fails_after: int = 10) -> None:
        self.chosen: list[int] = []
        self._fails_after = fails_after

    def start(self) -> Countdown:
        return Countdown(self._fails_after)

    def allow(self, words: np.ndarray) -> bool:
        return AllowedIds([3 - len(self.chosen)]).allow(words)

    def advance(self, token_id: int) -> None:
        self.chosen.append(token_id)
        if len(self.chosen) >= self._fails_after:
            raise ValueError("broken")


def end_token(model: Model) -> int:
    return min(model.config.end_token_ids)


@pytest.mark.parametrize("switches", [{}, {"num_pages": 12, "max_step_tokens": 16, "max_decode_batch_size": 8}])
def test_a_guide_decides_every_token_whatever_the_schedule(model: Model, switches: dict[str, Any]) -> None:
    engine = make_engine(model, **switches)
    params = SamplingParams(temperature=1.0, max_tokens=3, guide=Countdown(), ignore_eos=True)
    guided = [engine.add_parallel(PROMPT[k : k + 20], [params, params]) for k in range(3)]
    free = [engine.add(PROMPT[k : k + 20], SamplingParams(temperature=0.0, max_tokens=20)) for k in range(3)]
    run_to_end(engine)
    assert [sequence.output_ids for pair in guided for sequence in pair] == [[3, 2, 1]] * 6
    assert all(sequence.finish_reason is not FinishReason.ERROR for sequence in free)
    assert bool(switches) == (engine.stats.num_preemptions > 0)


def test_a_guide_that_breaks_ends_its_sequence_and_no_other(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(model)
    broken = engine.add(PROMPT, SamplingParams(max_tokens=3, guide=Countdown(fails_after=2)))
    fine = engine.add(PROMPT, SamplingParams(max_tokens=3, guide=Countdown()))
    events = run_to_end(engine)
    assert (broken.finish_reason, fine.output_ids) == (FinishReason.ERROR, [3, 2, 1])
    assert [event.token_id for event in events if event.sequence is broken] == [3, None]
    assert "a guide failed" in caplog.text


def test_the_token_that_ends_a_sequence_does_not_reach_the_guide(model: Model) -> None:
    engine = make_engine(model)
    params = SamplingParams(allowed_token_ids=(end_token(model),))
    sequence = engine.add(PROMPT, params)
    guided = engine.add(PROMPT, SamplingParams(guide=Countdown(), stop_token_ids=(2,)))
    run_to_end(engine)
    assert sequence.output_ids == [end_token(model)]
    assert guided.output_ids == [3, 2]
    assert isinstance(guided.guide, Countdown)
    assert guided.guide.chosen == [3]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [5, 10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [450, 499]}, "allowed_token_ids"),
    ],
)
def test_ids_the_model_does_not_have_are_refused(model: Model, params: dict[str, Any], param: str) -> None:
    engine = make_engine(model, vocab_limit=400)
    with pytest.raises(RequestError) as caught:
        engine.add(PROMPT, SamplingParams(**params))
    assert caught.value.param == param
