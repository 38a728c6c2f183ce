"""No switch changes an answer of the real checkpoint: a sample of the combinations of test_parity.py over real text."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupyllm import SamplingParams
from cupyllm.model import Model
from tests.engine_case import load_model, make_engine
from tests.golden_case import CASES, CHECKPOINT, NEEDS_CHECKPOINT
from tests.proof.answers import Answer, answers_of, assert_same

pytestmark = NEEDS_CHECKPOINT
B = 16
TEXTS = ["code_review", "chinese"]  # in turns, so that every second prompt begins alike
LENGTHS = [B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1]
MAX_TOKENS = 4
LONGEST = LENGTHS[-1] + MAX_TOKENS
TINY, LARGE = -(-LONGEST // B), 50
ALONE, TOGETHER = 1, 8


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(Path(CHECKPOINT))


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Answer]:
    """The answers of an engine that has room for everything, reuses nothing and does one thing at a time."""
    engine = make_engine(model, page_size=B, num_pages=LARGE, prefix_cache=False)
    return answers_of(engine, *asked(), at_a_time=1)


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    # The last tokens of each text: the beginnings of chats are all alike.
    texts = [case["prompt_ids"][-LONGEST:] for name in TEXTS for case in CASES if case["name"] == name]
    prompts = [texts[number % 2][:length] for number, length in enumerate(LENGTHS)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
    return prompts, [params] * len(prompts)


@pytest.mark.parametrize(
    ("chunk", "prefix_cache", "num_pages", "at_a_time", "count"),
    [
        pytest.param(1, True, LARGE, TOGETHER, 4, id="chunks of 1, cache"),
        pytest.param(B - 1, False, TINY, TOGETHER, 6, id="B-1, tiny pool"),
        pytest.param(B, True, TINY, TOGETHER, 6, id="B, cache, tiny pool"),
        pytest.param(B + 1, True, LARGE, ALONE, 6, id="B+1, cache, alone"),
        pytest.param(3 * B, False, LARGE, TOGETHER, 6, id="3B, all at once"),
        pytest.param(512, True, LARGE, TOGETHER, 6, id="whole prompts, cache, all at once"),
    ],
)
def test_no_switch_changes_an_answer(
    model: Model, expected: list[Answer], chunk: int, prefix_cache: bool, num_pages: int, at_a_time: int, count: int
) -> None:
    engine = make_engine(
        model,
        page_size=B,
        num_pages=num_pages,
        prefix_cache=prefix_cache,
        max_step_tokens=chunk,
        max_decode_batch_size=min(chunk, 8),
    )
    prompts, params = asked()
    found = answers_of(engine, prompts[:count], params[:count], at_a_time)
    assert_same(found, expected[:count])
    if num_pages == TINY:
        assert engine.stats.num_preemptions > 0, "a pool this small must preempt, or the case is void"
    if prefix_cache and num_pages == LARGE:
        assert engine.stats.num_cached_pages > 0
