"""Keeps the caller's text from becoming control tokens while a chat template handles it.

A template glues its own text and the caller's into one string, and in that string a user's `<|im_end|>` looks like the
template's. So before rendering, risky pieces of the caller's text are replaced by stand-ins; after rendering, whatever
still reads as a control token was written by the template, and the stand-ins are put back.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

from cupyllm.tokenizer import Tokenizer

# Names that templates look up or compare in messages and tools: only a whole token would be replaced in them.
_FORMAT_WORDS = frozenset(
    [
        *("role", "system", "user", "assistant", "tool", "content", "name", "reasoning_content"),
        *("tool_calls", "tool_call_id", "id", "type", "function", "arguments", "description", "parameters"),
        *("properties", "required", "items", "enum", "object", "array", "string", "number", "integer", "boolean"),
    ]
)


class RiskyText:
    """Which pieces of a text could be read as an added token, alone or glued to what a template writes next to them.

    Besides whole tokens these are an end that starts a token (`<|im_end|` before a template's `>`), a beginning that
    ends one, and a text that lacks nothing but outer marks (`tool_call`, as a key that a template writes in `<` and
    `>`). Of these it is enough to replace the first or the last character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.added_tokens
        self.whole = tokenizer.added_token_pattern
        self._longest = max(map(len, tokens), default=0)
        self._starts = {token[:n] for token in tokens for n in range(1, len(token))}
        self._ends = {token[n:] for token in tokens for n in range(1, len(token))}
        self._inner = {inner for token in tokens for inner in _without_outer_marks(token)}

    def edges(self, text: str) -> tuple[bool, bool]:
        """Whether the first and the last character of `text` could lie in a token that its surroundings complete."""
        if text in _FORMAT_WORDS:
            return False, False
        sizes = range(1, min(self._longest, len(text)) + 1)
        first = text in self._inner or any(text[:n] in self._ends for n in sizes)
        return first, any(text[-n:] in self._starts for n in sizes)


def _without_outer_marks(token: str) -> Iterator[str]:
    """What is left of a token without some marks at both ends: "think" and "/think" of "</think>"."""
    letters = [i for i, character in enumerate(token) if character.isalnum()]
    if letters:
        for begin in range(1, letters[0] + 1):
            for end in range(letters[-1] + 1, len(token)):
                yield token[begin:end]


class StandIns:
    """The stand-ins of one rendering. A caller cannot write one, because it holds a random 64-bit number."""

    def __init__(self, risky: RiskyText) -> None:
        self._risky = risky
        self._nonce = secrets.token_hex(8)
        self._literals: list[str] = []

    @property
    def end_mark(self) -> str:
        """A mark to be put behind a text, and found again in what a template makes of it."""
        return f"q{self._nonce}end"

    def replace_in(self, value: Any) -> Any:
        """A copy of a JSON value with stand-ins in all its strings, keys included."""
        if isinstance(value, str):
            return self._replace_in_text(value)
        if isinstance(value, dict):
            return {self.replace_in(key): self.replace_in(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.replace_in(item) for item in value]
        return value

    def put_back(self, text: str) -> str:
        """The text with what the stand-ins stand for."""
        if not self._literals:
            return text
        return re.sub(rf"q{self._nonce}n(\d+)q", lambda match: self._literals[int(match[1])], text)

    def _replace_in_text(self, text: str) -> str:
        first, last = self._risky.edges(text)
        begin = int(first)
        end = max(begin, len(text) - int(last))
        middle = self._risky.whole.sub(lambda match: self._stand_in(match[0]), text[begin:end])
        return self._stand_in(text[:begin]) + middle + self._stand_in(text[end:])

    def _stand_in(self, literal: str) -> str:
        """Letters and digits only: no template strips or splits them, and JSON has no other way to write them."""
        if not literal:
            return ""
        self._literals.append(literal)
        return f"q{self._nonce}n{len(self._literals) - 1}q"
