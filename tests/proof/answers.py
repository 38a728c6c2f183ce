"""Prompts for comparing engines, and what an engine answers to them: token ids, logprobs and why each one ended."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from cupyllm.engine import Engine
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason, Sequence

VOCAB = 500
LOGPROB_TOLERANCE = 1e-4


@dataclass
class Answer:
    """The events of one sequence, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def edge_prompts(count: int, page_size: int, seed: int) -> list[list[int]]:
    """Prompts of all lengths around the first eight page edges, then of any length; half of them begin alike."""
    rng = np.random.default_rng(seed)
    lengths = [k * page_size + around for k in range(1, 9) for around in (-1, 0, 1)]
    lengths += rng.integers(1, 9 * page_size, max(0, count - len(lengths))).tolist()
    text = rng.integers(0, VOCAB, 9 * page_size).tolist()
    prompts = []
    for number, length in enumerate(lengths[:count]):
        alike = int(rng.integers(0, length + 1)) if number % 2 else 0
        prompts.append(text[:alike] + rng.integers(0, VOCAB, length - alike).tolist())
    return prompts


def kinds_of_params(count: int, max_tokens: int, seed: int) -> list[SamplingParams]:
    """Greedy, seeded, and penalised in two ways with a seed, in turns; all with logprobs."""
    common = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2}
    return [
        (
            SamplingParams(temperature=0.0, **common),
            SamplingParams(temperature=1.0, seed=seed + number, top_p=0.95, **common),
            SamplingParams(temperature=0.8, seed=seed + number, top_k=40, repetition_penalty=1.3, **common),
            SamplingParams(
                temperature=0.9, seed=seed + number, presence_penalty=0.4, frequency_penalty=0.7, min_p=0.01, **common
            ),
        )[number % 4]
        for number in range(count)
    ]


def answers_of(engine: Engine, prompts: Seq[list[int]], params: Seq[SamplingParams], at_a_time: int) -> list[Answer]:
    """Ask everything, `at_a_time` in the engine at once; the books are checked after every step."""
    asked = list(zip(prompts, params, strict=True))
    sequences: list[Sequence] = []
    answers: dict[int, Answer] = {}
    while len(sequences) < len(asked) or engine.has_work:
        num_live = len(sequences) - sum(answer.finish_reason is not None for answer in answers.values())
        for prompt, one in asked[len(sequences) : len(sequences) + at_a_time - num_live]:
            sequences.append(engine.add(prompt, one))
            answers[sequences[-1].id] = Answer()
        collect(engine, answers)
    assert engine.stats.num_live_pages == 0
    return [answers[sequence.id] for sequence in sequences]


def collect(engine: Engine, answers: dict[int, Answer]) -> None:
    """Run one step and add what it gave."""
    for event in engine.step():
        answer = answers[event.sequence.id]
        assert answer.finish_reason is None, "a sequence that has ended gets no more tokens"
        assert event.token_id is not None
        answer.token_ids.append(event.token_id)
        answer.finish_reason = event.finish_reason
        if event.logprobs is not None:
            answer.logprobs.append(event.logprobs.logprob)
            answer.top.append(dict(event.logprobs.top))
    engine.scheduler.check_integrity()


def assert_same(found: Seq[Answer], expected: Seq[Answer]) -> None:
    """Equal ids and reasons; logprobs, also of the most likely tokens, equal but for rounding."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.token_ids == other.token_ids, f"answer {number} differs"
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=LOGPROB_TOLERANCE, rtol=0)
        for mine, theirs in zip(one.top, other.top, strict=True):
            assert mine.keys() == theirs.keys()
            values = np.array([[mine[token], theirs[token]] for token in mine])
            np.testing.assert_allclose(values[:, 0], values[:, 1], atol=LOGPROB_TOLERANCE, rtol=0)
