"""Guides of an answer's parts: a budget of reasoning, and guides that begin after it or with a call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupyllm.answer_guide import CallsGuide, ThinkingGuide, thinking_guide
from cupyllm.reasoning import ThinkTokens
from cupyllm.token_guide import AllowedIds, Guide, TokenGuide
from cupyllm.tokenizer import Tokenizer
from tests.qwen_tokenizer import QWEN3_TOKENS, write_tokenizer_folder

ANSWER = 70  # the only token of a guided answer


class OneByOne:
    """A guide that lets its tokens come in this order, then only its last."""

    def __init__(self, *token_ids: int) -> None:
        self._ids = list(token_ids)

    def start(self) -> TokenGuide:
        return OneByOne(*self._ids)

    def allow(self, words: np.ndarray) -> bool:
        return AllowedIds(self._ids[:1]).allow(words)

    def advance(self, token_id: int) -> None:
        assert token_id == self._ids[0], "a token that was not allowed"
        del self._ids[: len(self._ids) > 1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer_folder(tmp_path_factory.mktemp("qwen3"), added=QWEN3_TOKENS))


@pytest.fixture(scope="module")
def guide(tokenizer: Tokenizer) -> ThinkingGuide:
    marks = ThinkTokens.of(tokenizer)
    assert marks is not None
    end = tokenizer.added_tokens["<|im_end|>"]
    return thinking_guide(tokenizer, marks, thinking=False, budget=None, answer=None, end_ids=frozenset({end}))


def allowed(guide: TokenGuide, num_tokens: int) -> set[int] | None:
    """What may come next; None for anything."""
    words = np.zeros(-(-num_tokens // 32), np.uint32)
    if not guide.allow(words):
        assert not words.any()
        return None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return {int(i) for i in np.flatnonzero(bits) if i < num_tokens}


def follow(guide: Guide, tokenizer: Tokenizer, wishes: list[int]) -> list[int]:
    """What a model says that wants to say `wishes`: a token that may not come is left for later."""
    now, said, left = guide.start(), [], list(wishes)
    while left:
        may = allowed(now, tokenizer.num_tokens)
        said.append(left.pop(0) if may is None or left[0] in may else min(may))
        now.advance(said[-1])
        assert len(said) < 100
    return said


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 3, 6])
def test_a_budget_ends_the_reasoning(tokenizer: Tokenizer, guide: ThinkingGuide, thinking: bool, budget: int) -> None:
    begin = [] if thinking else [guide.marks.begin]
    thought, answer = [65, 66, 67, 68, 69], [70, 71]
    forced = [*guide.line_break, guide.marks.end, *guide.blank_line]
    said = follow(
        replace(guide, thinking=thinking, budget=budget), tokenizer, [*begin, *thought, guide.marks.end, *answer]
    )
    if budget > len(thought):
        assert said == [*begin, *thought, guide.marks.end, *answer]
    else:
        assert said == [*begin, *thought[:budget], *forced, *thought[budget:], guide.marks.end, *answer]


@pytest.mark.parametrize("thinking", [False, True])
def test_the_guide_of_the_answer_begins_after_the_reasoning(
    tokenizer: Tokenizer, guide: ThinkingGuide, thinking: bool
) -> None:
    (end,) = guide.end_ids
    now = replace(guide, thinking=thinking, answer=OneByOne(ANSWER, 71, end)).start()
    if not thinking:
        assert allowed(now, tokenizer.num_tokens) == {ANSWER, guide.marks.begin}
        now.advance(guide.marks.begin)
    for token_id in (65, guide.marks.begin, 66, guide.marks.end):
        assert allowed(now, tokenizer.num_tokens) == set(range(tokenizer.num_tokens)) - {end}
        now.advance(token_id)
    for token_id in (*guide.blank_line, ANSWER, 71, end):
        assert allowed(now, tokenizer.num_tokens) == {token_id}
        now.advance(token_id)


def test_a_model_that_does_not_think_is_guided_from_its_first_token(tokenizer: Tokenizer, guide: ThinkingGuide) -> None:
    now = replace(guide, budget=3, answer=OneByOne(ANSWER, 71)).start()
    now.advance(ANSWER)
    assert allowed(now, tokenizer.num_tokens) == {71}
    free = replace(guide, budget=1).start()
    for token_id in (65, guide.marks.begin, 66, 67, 68):
        assert allowed(free, tokenizer.num_tokens) is None, "a mark within the content begins nothing"
        free.advance(token_id)


def test_each_answer_has_a_guide_of_its_own(tokenizer: Tokenizer, guide: ThinkingGuide) -> None:
    shared = replace(guide, thinking=True, budget=1)
    first, second = shared.start(), shared.start()
    first.advance(65)
    assert allowed(first, tokenizer.num_tokens) == {guide.line_break[0]}
    assert allowed(second, tokenizer.num_tokens) is None


def test_calls_are_guided_from_their_opening_on(tokenizer: Tokenizer) -> None:
    opening = tokenizer.added_tokens["<tool_call>"]
    now = CallsGuide(opening, None, OneByOne(opening, 65, 66)).start()
    for token_id in (70, 71, opening):
        assert allowed(now, tokenizer.num_tokens) is None
        now.advance(token_id)
    for token_id in (65, 66):
        assert allowed(now, tokenizer.num_tokens) == {token_id}
        now.advance(token_id)


def test_a_guided_content_or_a_call_in_its_place(tokenizer: Tokenizer) -> None:
    opening = tokenizer.added_tokens["<tool_call>"]
    guide = CallsGuide(opening, OneByOne(ANSWER, 71), OneByOne(opening, 65))
    content, call = guide.start(), guide.start()
    assert allowed(content, tokenizer.num_tokens) == allowed(call, tokenizer.num_tokens) == {ANSWER, opening}
    content.advance(ANSWER)
    assert allowed(content, tokenizer.num_tokens) == {71}
    call.advance(opening)
    assert allowed(call, tokenizer.num_tokens) == {65}
