"""The answer of /v1/responses, built from the parts of the model's message: the object, and every event on the way.

A response has output items in the order in which the model wrote them: its reasoning, messages, and calls of functions.
Each is announced, grows, and is closed before the next begins:

    response.created, response.in_progress
    response.output_item.added, response.content_part.added          an item begins; calls have no content parts
    response.output_text.delta ...                                   or reasoning_text, or function_call_arguments
    response.output_text.done, response.content_part.done, response.output_item.done
    response.completed                                               or response.incomplete, or response.failed

The plain answer is what the writer has built at the end, so that both forms say the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cupyllm.message_parts import CallArguments, CallBegin, CallEnd, ContentText, MessagePart, ReasoningText

Json = dict[str, Any]
# kind of item -> the start of its ids, the type of its content part if it has one, and what its text events are called
_KINDS = {
    "reasoning": ("rs", "reasoning_text", "response.reasoning_text"),
    "message": ("msg", "output_text", "response.output_text"),
    "function_call": ("fc", None, "response.function_call_arguments"),
}


@dataclass
class _Item:
    """The item that is being written."""

    kind: str
    given: Json  # what is known from the start
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)  # of a message's tokens, where they were asked for

    def __post_init__(self) -> None:
        start, self.part_type, self.event = _KINDS[self.kind]
        self.id = f"{start}_{uuid.uuid4().hex}"

    def part(self, text: str) -> Json:
        annotations: Json = {"annotations": []} if self.kind == "message" else {}
        return {"type": self.part_type, "text": text} | annotations | self.given_logprobs(self.logprobs)

    def given_logprobs(self, logprobs: list[Json]) -> Json:
        """The key that a message's text has, and reasoning and calls have not."""
        return {"logprobs": list(logprobs)} if self.kind == "message" else {}

    def as_json(self, status: str, content: Any) -> Json:
        """The item with its content parts, or with its arguments."""
        body = {"arguments" if self.part_type is None else "content": content}
        return {"id": self.id, "type": self.kind, "status": status} | self.given | body


class ResponseWriter:
    """Writes one response. Each method gives the events that it causes; `response` is the object as it stands."""

    def __init__(self, response: Json) -> None:
        """`response` has all but status, output and usage."""
        self.response = response | {"status": "in_progress", "output": [], "usage": None}
        self._number = 0
        self._item: _Item | None = None
        self._logprobs: list[Json] = []  # of tokens whose text has not come yet

    def begin(self) -> Iterator[Json]:
        """The events before any output."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self.response | {"output": []})

    def add(self, parts: Iterable[MessagePart], logprobs: Iterable[Json] = ()) -> Iterator[Json]:
        """Write on. `logprobs` are those of the tokens that the parts were read from; messages alone show them."""
        self._logprobs += logprobs
        for part in parts:
            match part:
                case ReasoningText(text):
                    yield from self._add_text("reasoning", text)
                case ContentText(text):
                    yield from self._add_text("message", text)
                case CallBegin(_, call_id, name):
                    yield from self._open("function_call", {"call_id": call_id, "name": name})
                case CallArguments(_, text):
                    yield from self._add_text("function_call", text)
                case CallEnd():
                    yield from self._close("completed")

    def finish(self, finish_reason: str, usage: Json) -> Iterator[Json]:
        """The model has ended; "length": it was cut off. An answer of nothing is an empty message."""
        status = "incomplete" if finish_reason == "length" else "completed"
        if self._item is None and not self.response["output"]:
            yield from self._open("message")
        if self._item is not None:
            self._item.logprobs += self._logprobs  # of tokens without text, such as the end token
        yield from self._close(status)
        self.response |= {"status": status, "usage": usage}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, message: str, *, code: str = "server_error") -> Iterator[Json]:
        """The answer failed. What has been written stays as it is."""
        yield from self._close("incomplete")
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        yield self._event("response.failed", response=self.response)

    def _add_text(self, kind: str, text: str) -> Iterator[Json]:
        if self._item is None or self._item.kind != kind:
            yield from self._open(kind)
        item = self._item
        assert item is not None
        item.pieces.append(text)
        logprobs, self._logprobs = self._logprobs, []
        item.logprobs += logprobs
        if text:
            yield self._item_event(f"{item.event}.delta", item, delta=text, **item.given_logprobs(logprobs))

    def _open(self, kind: str, given: Json | None = None) -> Iterator[Json]:
        yield from self._close("completed")
        self._item = item = _Item(kind, given or _given(kind))
        begun = item.as_json("in_progress", "" if item.part_type is None else [])
        yield self._event("response.output_item.added", output_index=self._index, item=begun)
        if item.part_type is not None:
            yield self._item_event("response.content_part.added", item, part=item.part(""))

    def _close(self, status: str) -> Iterator[Json]:
        if self._item is None:
            return
        item, text = self._item, "".join(self._item.pieces)
        if item.part_type is None:
            yield self._item_event(f"{item.event}.done", item, arguments=text)
            done = item.as_json(status, text)
        else:
            yield self._item_event(f"{item.event}.done", item, text=text, **item.given_logprobs(item.logprobs))
            yield self._item_event("response.content_part.done", item, part=item.part(text))
            done = item.as_json(status, [item.part(text)])
        yield self._event("response.output_item.done", output_index=self._index, item=done)
        self.response["output"] = [*self.response["output"], done]
        self._item = None

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _item_event(self, name: str, item: _Item, **fields: Any) -> Json:
        place = {"content_index": 0} if item.part_type is not None else {}
        return self._event(name, item_id=item.id, output_index=self._index, **place, **fields)

    def _event(self, name: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1} | fields


def _given(kind: str) -> Json:
    return {"role": "assistant"} if kind == "message" else {"summary": [], "encrypted_content": None}
