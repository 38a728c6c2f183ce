"""Guides for the parts of an answer: reasoning first, then content or tool calls, each with a guide of its own.

A grammar says what an answer holds and knows nothing of reasoning; here it begins where the reasoning has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.reasoning import ThinkTokens
from cupyllm.token_guide import Guide, TokenGuide
from cupyllm.tokenizer import Tokenizer


def allow_id(words: np.ndarray, token_id: int) -> None:
    """Set the bit of one token in the words of TokenGuide.allow."""
    words[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)


@dataclass(frozen=True)
class ThinkingGuide:
    """A Guide for models that think: ends the reasoning when its budget is spent, and guides what follows it.

    marks        the tokens around reasoning
    thinking     whether the prompt has begun the reasoning; else the model may begin it with its first token
    budget       at most so many tokens of reasoning, marks not counted; None is no limit
    answer       the guide of what follows the reasoning; None lets anything follow
    end_ids      tokens that would end the output; with an answer to be guided they cannot come while thinking
    line_break   the tokens of "\\n", which go before the mark where the budget ends the reasoning
    blank_line   the tokens of "\\n\\n", which models write behind it

    Line breaks are forced only where the guide has to: after a spent budget, and before a guided answer, whose guide
    need not know them.
    """

    marks: ThinkTokens
    thinking: bool
    budget: int | None
    answer: Guide | None
    end_ids: frozenset[int]
    line_break: tuple[int, ...]
    blank_line: tuple[int, ...]

    def start(self) -> TokenGuide:
        return _Thinking(self, None if self.answer is None else self.answer.start())


def thinking_guide(
    tokenizer: Tokenizer,
    marks: ThinkTokens,
    *,
    thinking: bool,
    budget: int | None,
    answer: Guide | None,
    end_ids: frozenset[int],
) -> ThinkingGuide:
    """A ThinkingGuide with the line breaks of this tokenizer."""
    line_break, blank_line = (tuple(tokenizer.encode(text)) for text in ("\n", "\n\n"))
    return ThinkingGuide(marks, thinking, budget, answer, end_ids, line_break, blank_line)


class _Thinking:
    """The TokenGuide of one answer."""

    def __init__(self, guide: ThinkingGuide, answer: TokenGuide | None) -> None:
        self._guide = guide
        self._answer = answer
        self._thinking = guide.thinking
        self._may_begin = not guide.thinking
        self._count = 0  # tokens of reasoning
        self._forced: list[int] = []  # what must come next, in order
        self._check_budget()

    def allow(self, words: np.ndarray) -> bool:
        if self._forced:
            allow_id(words, self._forced[0])
            return True
        if self._thinking:
            return self._allow_all_but_ends(words)
        if self._answer is None or not self._answer.allow(words):
            return False
        if self._may_begin:
            allow_id(words, self._guide.marks.begin)
        return True

    def advance(self, token_id: int) -> None:
        may_begin, self._may_begin = self._may_begin, False
        if self._forced:
            self._forced.pop(0)
        elif self._thinking:
            self._advance_thinking(token_id)
        elif may_begin and token_id == self._guide.marks.begin:
            self._thinking = True
            self._check_budget()
        elif self._answer is not None:
            self._answer.advance(token_id)

    def _advance_thinking(self, token_id: int) -> None:
        if token_id == self._guide.marks.end:
            self._thinking = False
            self._forced = list(self._guide.blank_line) if self._answer is not None else []
        else:
            self._count += 1
            self._check_budget()

    def _check_budget(self) -> None:
        guide = self._guide
        if self._thinking and guide.budget is not None and self._count >= guide.budget:
            self._thinking = False
            self._forced = [*guide.line_break, guide.marks.end, *guide.blank_line]

    def _allow_all_but_ends(self, words: np.ndarray) -> bool:
        if self._answer is None:
            return False
        words[:] = np.uint32(0xFFFFFFFF)
        for token_id in self._guide.end_ids:
            words[token_id // 32] &= ~(np.uint32(1) << np.uint32(token_id % 32))
        return True


@dataclass(frozen=True)
class CallsGuide:
    """A Guide for answers that may turn into tool calls: where the model writes `opening`, the guide of calls begins.

    content  what else the answer may be, where that is restricted: a call then takes the place of all of it
    calls    what calls look like, from `opening` on to the end of the answer
    """

    opening: int
    content: Guide | None
    calls: Guide

    def start(self) -> TokenGuide:
        return _ContentOrCalls(self, None if self.content is None else self.content.start())


class _ContentOrCalls:
    """The TokenGuide of one answer."""

    def __init__(self, guide: CallsGuide, content: TokenGuide | None) -> None:
        self._guide = guide
        self._now = content
        self._may_call = True

    def allow(self, words: np.ndarray) -> bool:
        if self._now is None or not self._now.allow(words):
            return False
        if self._may_call:
            allow_id(words, self._guide.opening)
        return True

    def advance(self, token_id: int) -> None:
        if self._may_call and token_id == self._guide.opening:
            self._may_call = False
            self._now = self._guide.calls.start()
        self._may_call = self._may_call and self._guide.content is None
        if self._now is not None:
            self._now.advance(token_id)
