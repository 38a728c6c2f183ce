"""Text that grows token by token: which part of it is certain and may be shown now.

Two things make the newest text uncertain. The bytes of one character may be spread over several tokens, so a token
alone can end in half a character (IncrementalDecoder). And the last characters may be the start of a stop string, which
must not be shown once it is complete (StopMatcher). Both hold back as little as possible and give the rest at `finish`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from cupyllm.errors import RequestError
from cupyllm.tokenizer import Tokenizer


class IncrementalDecoder:
    """The text of a growing list of ids. All pushes and finish, joined, equal tokenizer.decode of all the ids.

    Each push costs time in proportion to the token, not to the text so far: a byte-level token always stands for the
    same bytes, and at most three bytes of an unfinished character are kept.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, possibly none. Bytes that cannot be UTF-8 become U+FFFD."""
        if token_id in self._skip:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What an unfinished character at the end becomes: U+FFFD, or "" when there is none."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Cuts a growing text at a stop string, whatever pieces the text arrives in.

    The rule: the text ends at the first character that completes any stop string; where several are completed by that
    character, the longest counts. The stop string is cut away, or kept with `include_stop`. No start of a stop string
    is shown before it is clear that the string does not follow, so at most the longest stop string less one character
    is held.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise RequestError("a stop string must not be empty", param="stop")
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to be shown, given that `text` follows. After a match always ""."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[:end] if self._include_stop else text[: end - len(self.matched)]
        certain = min((start_of_partial(text, stop) for stop in self._stops), default=len(text))
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text held at the end, which no stop string has claimed; "" after a match."""
        return self._held


def start_of_partial(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that is a start of `stop`, not all of it; len(text) when there is none."""
    begin = max(0, len(text) - len(stop) + 1)
    while (begin := text.find(stop[0], begin)) >= 0:
        if stop.startswith(text[begin:]):
            return begin
        begin += 1
    return len(text)
