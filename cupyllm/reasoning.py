"""Reasoning and answer, told apart by tokens while they come.

Qwen3 thinks between the tokens `<think>` and `</think>` before it answers. The tokens count, not their text: a model
that quotes a mark, in its reasoning or later, ends and begins nothing. Reasoning comes first or not at all: it begins
in the prompt, where the chat template has opened it, or with the first token of the answer.

The template writes line breaks around reasoning and before the answer. They belong to the format: they are dropped
here, and the template writes them anew when the message comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupyllm.text_stream import IncrementalDecoder
from cupyllm.tokenizer import Tokenizer

BEGIN_MARK, END_MARK = "<think>", "</think>"


@dataclass(frozen=True)
class ThinkTokens:
    """The ids of the marks around reasoning."""

    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ThinkTokens | None:
        """Those of this tokenizer; None where it has none, as that of Qwen2.5: such a model's text is never split."""
        begin, end = (tokenizer.added_tokens.get(mark) for mark in (BEGIN_MARK, END_MARK))
        return None if begin is None or end is None else cls(begin, end)

    def left_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether reasoning goes on at the end of a prompt. Its control tokens are the template's, not a user's."""
        last = next((token_id for token_id in reversed(prompt_ids) if token_id in (self.begin, self.end)), self.end)
        return last == self.begin


@dataclass(frozen=True)
class NewText:
    """What one token has added to an answer."""

    content: str = ""
    reasoning: str = ""

    def __add__(self, more: NewText) -> NewText:
        return NewText(self.content + more.content, self.reasoning + more.reasoning)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning)


class AnswerDecoder:
    """The reasoning and the content of one answer, from its token ids. Without ThinkTokens all is content.

    num_reasoning_tokens counts the marks too.
    """

    def __init__(self, tokenizer: Tokenizer, marks: ThinkTokens | None = None, *, thinking: bool = False) -> None:
        self.thinking = thinking
        self.num_reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._marks = marks
        self._decoder = IncrementalDecoder(tokenizer)
        self._begun = False
        self._has_thought = thinking
        self._shown = False  # some text of the part that is being read
        self._held = ""  # line breaks that may be the last of the reasoning

    def push(self, token_id: int) -> NewText:
        """The text that this token completes."""
        first, self._begun = not self._begun, True
        self.num_reasoning_tokens += self.thinking
        if self._marks is None:
            return NewText(self._decoder.push(token_id))
        if first and token_id == self._marks.begin:
            self.thinking = self._has_thought = True
            self.num_reasoning_tokens = 1
            return NewText()
        if self.thinking and token_id == self._marks.end:
            return self._end_thinking()
        return self._as_new_text(self._decoder.push(token_id))

    def finish(self) -> NewText:
        """What an unfinished character at the end becomes."""
        return self._as_new_text(self._decoder.finish())

    def _end_thinking(self) -> NewText:
        last = self.finish()
        self.thinking = self._shown = False
        self._decoder = IncrementalDecoder(self._tokenizer)
        return last

    def _as_new_text(self, text: str) -> NewText:
        if self._has_thought and not self._shown:
            text = text.lstrip("\n")
        self._shown = self._shown or bool(text)
        if not self.thinking:
            return NewText(text)
        text = self._held + text
        shown = text.rstrip("\n")
        self._held = text[len(shown) :]
        return NewText(reasoning=shown)
