"""Server-sent events however they are cut, and what the events of various servers say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cupyllm.load.events import DONE, Event, EventSplitter, error_message, read_event

STREAM = b': ping\n\ndata: {"a": 1}\n\nevent: x\nid: 7\ndata:{"b":\ndata: 2}\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b":\n2}', DONE]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
def test_events_are_the_same_however_the_stream_is_cut(size: int) -> None:
    splitter = EventSplitter()
    found = [event for start in range(0, len(STREAM), size) for event in splitter.feed(STREAM[start : start + size])]
    assert found == EVENTS


def test_an_event_that_has_not_ended_is_none_yet() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b'data: {"a": 1}\n') == []
    assert splitter.feed(b"\n") == [b'{"a": 1}']


def event(**fields: Any) -> Event:
    return read_event(json.dumps(fields).encode())


def delta(**fields: Any) -> Event:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


def test_text_is_what_the_model_wrote_in_whatever_field() -> None:
    assert delta(content="x").has_text
    assert delta(reasoning_content="x").has_text
    assert delta(reasoning="x").has_text
    assert delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]).has_text
    assert event(choices=[{"index": 0, "text": "x", "finish_reason": None}]).has_text


def test_the_events_around_the_text_are_none() -> None:
    assert delta(role="assistant", content="") == Event()
    assert delta(role="assistant", content=None) == Event()
    assert event(choices=[{"delta": {}, "finish_reason": "stop"}]) == Event(is_last=True)
    assert event(choices=[{"text": "", "finish_reason": None}]) == Event()
    assert event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 5}) == Event(False, False, 3, 5)
    assert event(choices=[], usage=None) == Event()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "out of pages", "code": 500}}', "out of pages"),
        (b'{"error": "out of pages"}', "out of pages"),
        (b'{"error": {"code": 500}}', '{"code": 500}'),
        (b"not json", "an event that is not a JSON object"),
        (b"[1]", "an event that is not a JSON object"),
    ],
)
def test_errors_of_any_shape_are_errors(data: bytes, message: str) -> None:
    assert read_event(data).error == message


def test_the_message_of_a_refusal() -> None:
    assert error_message({"detail": "no"}) == '{"detail": "no"}'
    assert error_message({"error": {"message": "no"}}) == "no"
    assert error_message(["no"]) == '["no"]'
