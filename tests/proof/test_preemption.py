"""Preemption loses, repeats and changes nothing: random runs in pools of 6 to 12 pages against a pool with room."""

from __future__ import annotations

import numpy as np
import pytest

from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.engine import Engine
from cupyllm.model import Model
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence
from tests.engine_case import make_engine
from tests.proof.answers import VOCAB, Answer, answers_of, assert_same, collect, kinds_of_params
from tests.proof.scale import pick

NUM_RUNS = pick(50, 500)
B = 4


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_random_runs_in_small_pools_give_the_same_answers(model: Model) -> None:
    num_preempted_runs = 0
    for seed in range(NUM_RUNS):
        engine, prompts, params = draw_run(model, seed)
        roomy = make_engine(model, page_size=B, prefix_cache=False, max_step_tokens=512)
        expected = answers_of(roomy, prompts, params, at_a_time=1)
        sequences, found = arrive_at_random(engine, prompts, params, seed)
        assert_same(found, expected)
        for sequence, one in zip(sequences, params, strict=True):
            assert sequence.num_output_tokens == one.max_tokens
            assert 0 <= sequence.num_cached_tokens < sequence.num_prompt_tokens
            assert sequence.num_preemptions <= len(sequences), "at most rivals + 1 times"
        num_preempted_runs += engine.stats.num_preemptions > 0
        assert engine.stats.num_preemptions == sum(sequence.num_preemptions for sequence in sequences)
    assert num_preempted_runs >= 0.95 * NUM_RUNS, f"the test is void: only {num_preempted_runs} runs preempted anything"


def draw_run(model: Model, seed: int) -> tuple[Engine, list[list[int]], list[SamplingParams]]:
    """A pool of 6 to 12 pages, limits of any size, and requests that fit the pool alone but not together."""
    rng = np.random.default_rng(seed)
    num_pages, rows, count = int(rng.integers(6, 13)), int(rng.integers(2, 9)), int(rng.integers(4, 11))
    most = num_pages * B
    text = rng.integers(0, VOCAB, most).tolist()
    prompts = []
    for _ in range(count):
        length = int(rng.integers(1, most // 2))
        alike = int(rng.integers(0, length + 1)) if rng.random() < 0.5 else 0
        prompts.append(text[:alike] + rng.integers(0, VOCAB, length - alike).tolist())
    engine = make_engine(
        model,
        page_size=B,
        num_pages=num_pages,
        max_decode_batch_size=rows,
        max_prefill_batch_size=int(rng.integers(1, 5)),
        max_step_tokens=rows + int(rng.integers(0, 40)),
        prefix_cache=bool(rng.random() < 0.7),
    )
    return engine, prompts, kinds_of_params(count, most // 2, seed)


def arrive_at_random(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], seed: int
) -> tuple[list[Sequence], list[Answer]]:
    """Ask everything, one request in some steps and several in others."""
    rng = np.random.default_rng(seed)
    sequences: list[Sequence] = []
    answers: dict[int, Answer] = {}
    while len(sequences) < len(prompts) or engine.has_work:
        while len(sequences) < len(prompts) and rng.random() < 0.5:
            sequences.append(engine.add(prompts[len(sequences)], params[len(sequences)]))
            answers[sequences[-1].id] = Answer()
        collect(engine, answers)
    assert engine.stats.num_live_pages == 0
    return sequences, [answers[sequence.id] for sequence in sequences]


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_forks_and_beams_in_small_pools_are_what_they_are_in_large_ones(model: Model) -> None:
    num_preemptions = 0
    for seed in range(pick(20, 200)):
        rng = np.random.default_rng(seed)
        num_pages, rows = int(rng.integers(8, 13)), int(rng.integers(4, 9))
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 16)).tolist() for _ in range(3)]
        limits = {"max_decode_batch_size": rows, "max_step_tokens": rows + int(rng.integers(0, 30))}
        tight = make_engine(model, page_size=B, num_pages=num_pages, **limits)
        assert answer_all_kinds(tight, prompts, seed) == answer_all_kinds(
            make_engine(model, page_size=B), prompts, seed
        )
        num_preemptions += tight.stats.num_preemptions > 0
    assert num_preemptions >= 0.95 * pick(20, 200), "the test is void"


def answer_all_kinds(engine: Engine, prompts: list[list[int]], seed: int) -> list[list[int]]:
    """Two searches, four answers to one prompt, and one answer, side by side."""
    ids_of: list[list[int]] = []
    seeded = [SamplingParams(temperature=1.0, seed=seed + k, max_tokens=14, ignore_eos=True) for k in range(4)]
    searches = [engine.add_beams(prompts[k], BeamParams(2 + k, max_tokens=10, ignore_eos=True)) for k in range(2)]
    sequences = [*engine.add_parallel(prompts[2], seeded), engine.add(prompts[0], seeded[0])]
    ended: list[BeamSearch] = []
    while engine.has_work:
        ended += engine.step().ended_searches
        engine.scheduler.check_integrity()
    assert engine.stats.num_live_pages == 0
    assert {id(search) for search in ended} == {id(search) for search in searches}
    for search in searches:
        ids_of += [list(beam.token_ids) for beam in search.finished]
    return ids_of + [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize("around", [1, 2, 7, 31, 63])
def test_a_seeded_request_gives_the_same_tokens_in_any_company(model: Model, around: int) -> None:
    """Bar 5: 40 seeded requests in each company: alone and among `around` others in a pool that preempts."""
    rng = np.random.default_rng(around)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 20)).tolist() for _ in range(40)]
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(40)]
    roomy = make_engine(model, page_size=B, prefix_cache=False)
    expected = [answer.token_ids for answer in answers_of(roomy, prompts, params, at_a_time=1)]
    engine = make_engine(model, page_size=B, num_pages=max(12, 4 * around), max_decode_batch_size=64)
    found = answers_of(engine, prompts, params, at_a_time=around + 1)
    assert [answer.token_ids for answer in found] == expected
    assert len({tuple(ids) for ids in expected}) > 30, "seeds make a difference"


def test_the_same_config_seed_gives_the_same_tokens_after_a_restart(model: Model) -> None:
    prompts = [[1, 2, 3]] * 8
    params = [SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)] * 8
    runs = [
        [answer.token_ids for answer in answers_of(make_engine(model, seed=seed), prompts, params, at_a_time=8)]
        for seed in (5, 5, 6)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
