"""Tool calls in a model's text, found while the text arrives.

Qwen models write a call as the chat template taught them (the "hermes" form), as many in a row as they want:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The rules; they hold for every cut of the text into pieces, and no text is lost:

- A call begins where `<tool_call>` is followed by such an object up to the opening brace of its arguments, or by an
  object with a name alone, whose arguments are {}. Anything else after `<tool_call>` is content, mark included.
- The arguments are the text from that brace to the one that closes it, as the model wrote it, valid JSON or not. Where
  none closes it they go to `</tool_call>` outside of a string, else to the end of the output.
- Closing braces, white space and `</tool_call>` after the arguments belong to the call; other text is content.
- White space before a call is dropped, and after a call unless content stands on both sides; and at the end of an
  answer that has calls.

The parser is written by hand and reads every character a bounded number of times: a pattern that tries again from many
places would let a model's output, and so a prompt, stop the server.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from cupyllm.message_parts import CallArguments, CallBegin, CallEnd, ContentText, Message, MessagePart
from cupyllm.text_stream import start_of_partial
from cupyllm.tools import NAME_PATTERN

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
MAX_HEADER_CHARACTERS = 512  # from `<tool_call>` to the opening brace of the arguments

_NAME = "a name"
_HEADER = ("{", '"name"', ":", _NAME, ",", '"arguments"', ":", "{")
_QUOTED_NAME = re.compile(f'"({NAME_PATTERN})"')
_BEGUN_NAME = re.compile(r'(?:"[A-Za-z0-9_-]{0,64})?')
_MARKS = re.compile(r'["\\{}\[\]<]')
_SPACE = " \t\r\n"


def parse_tool_calls(text: str) -> Message:
    """The content and the calls in the text of a finished answer."""
    parser, message = ToolCallParser(), Message()
    message.add(parser.push(text))
    message.add(parser.finish())
    return message


class ToolCallParser:
    """Takes the text of one answer piece by piece; what `push` returns is certain.

    Only what may be the start of a call is held back: white space and the beginning of `<tool_call>`, then what stands
    between that and the arguments. The arguments are passed on as they come.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._text = ""  # not decided yet
        self._read: Callable[[bool], bool] = self._read_content
        self._parts: list[MessagePart] = []
        self._has_content = False
        self._space = ""  # before the call that may be beginning
        self._depth = 0  # of the arguments' braces and brackets
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> list[MessagePart]:
        """What is certain, given that `text` follows."""
        return self._advance(text, ended=False)

    def finish(self) -> list[MessagePart]:
        """What the text held back is, given that nothing follows."""
        return self._advance("", ended=True)

    def _advance(self, text: str, ended: bool) -> list[MessagePart]:
        self._text += text
        while self._read(ended):
            pass
        parts, self._parts = self._parts, []
        return parts

    # Each of the four takes from self._text what it can decide, and returns whether another one is to go on.

    def _read_content(self, ended: bool) -> bool:
        opening = self._text.find(OPENING)
        end = opening if opening >= 0 else len(self._text) if ended else start_of_partial(self._text, OPENING)
        content = self._text[:end].rstrip(_SPACE)
        if ended and opening < 0 and not (self.num_calls and not content):
            content = self._text
        self._add_content(content)
        if opening < 0:
            self._text = "" if ended else self._text[len(content) :]
            return False
        self._space = self._text[len(content) : opening]
        self._text = self._text[opening + len(OPENING) :]
        self._read = self._read_header
        return True

    def _read_header(self, ended: bool) -> bool:
        header = _read_header(self._text)
        if header is None and not ended:
            return False
        if header is None or header.name is None:
            self._add_content(self._space + OPENING)
            self._read = self._read_content
            return True
        self._text = self._text[header.end :]
        self._parts.append(CallBegin(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", header.name))
        self._depth = 0
        self._read = self._read_arguments
        if not header.has_arguments:
            self._end_arguments("{}")
        return True

    def _read_arguments(self, ended: bool) -> bool:
        at = int(self._escaped and bool(self._text))
        self._escaped = self._escaped and not at
        while match := _MARKS.search(self._text, at):
            mark, at = match[0], match.end()
            if self._in_string:
                if mark == "\\":
                    self._escaped = at == len(self._text)
                    at += not self._escaped
                elif mark == '"':
                    self._in_string = False
            elif mark == '"':
                self._in_string = True
            elif mark == "<":
                if self._text.startswith(CLOSING, at - 1):
                    return self._end_arguments(self._text[: at - 1], length=at - 1)
                if CLOSING.startswith(self._text[at - 1 :]) and not ended:
                    return self._pass_arguments(at - 1)
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._end_arguments(self._text[:at], length=at)
        return self._pass_arguments(len(self._text))

    def _read_tail(self, ended: bool) -> bool:
        tail = self._text.lstrip(_SPACE + "}")
        if CLOSING.startswith(tail) and tail != CLOSING:
            self._text = tail
            return False
        self._text = tail.removeprefix(CLOSING)
        self._read = self._read_content
        return True

    def _pass_arguments(self, length: int) -> bool:
        if length:
            self._parts.append(CallArguments(self.num_calls, self._text[:length]))
        self._text = self._text[length:]
        return False

    def _end_arguments(self, arguments: str, length: int = 0) -> bool:
        self._parts += [CallArguments(self.num_calls, arguments), CallEnd(self.num_calls)]
        self._text = self._text[length:]
        self.num_calls += 1
        self._read = self._read_tail
        return True

    def _add_content(self, text: str) -> None:
        if self.num_calls and not self._has_content:
            text = text.lstrip(_SPACE)
        if text:
            self._parts.append(ContentText(text))
            self._has_content = True


@dataclass(frozen=True)
class _Header:
    """What stands before a call's arguments. `name` is None where this is no call; `end` is where they begin."""

    name: str | None
    has_arguments: bool = True
    end: int = 0


_NO_CALL = _Header(None)


def _read_header(text: str) -> _Header | None:
    """The header that `text`, which follows `<tool_call>`, begins with; None while that is not clear."""
    at, name = 0, None
    for wanted in _HEADER:
        at = len(text) - len(text[at:].lstrip(_SPACE))
        if at > MAX_HEADER_CHARACTERS:
            return _NO_CALL
        if wanted is _NAME:
            quoted = _QUOTED_NAME.match(text, at)
            if quoted is None:
                return None if _BEGUN_NAME.fullmatch(text, at) else _NO_CALL
            name, at = quoted[1], quoted.end()
        elif text.startswith(wanted, at):
            at += len(wanted)
        elif wanted == "," and text.startswith("}", at):
            return _Header(name, False, at)
        else:
            return None if wanted.startswith(text[at:]) else _NO_CALL
    return _Header(name, True, at - 1)
