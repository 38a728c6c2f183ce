"""A stream of server-sent events, and what each of its events says, whatever server of this kind sent it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"
# Where servers put what the model has written: answer, thoughts, calls of tools.
_WRITTEN = ("content", "reasoning_content", "reasoning", "tool_calls")


class EventSplitter:
    """Cuts a stream into the data of its events; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The events that end in what has been received, in order."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data.clear()
        return found


@dataclass(frozen=True)
class Event:
    """What one event of an answer says. Token counts are None in events that do not give them."""

    has_text: bool = False
    is_last: bool = False  # a choice ends with it
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None


def read_event(data: bytes) -> Event:
    """Read an event that is not `DONE`. One that is no JSON object is an error of the server's."""
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return Event(error="an event that is not a JSON object")
    if value.get("error") is not None:
        return Event(error=error_message(value))
    usage = value.get("usage") or {}
    choices = value.get("choices") or []
    return Event(
        has_text=any(_has_text(choice) for choice in choices),
        is_last=any(choice.get("finish_reason") is not None for choice in choices),
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
    )


def error_message(value: Any) -> str:
    """The message of an error answer in OpenAI's shape, or in some other."""
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return message if isinstance(message, str) else json.dumps(message)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(key) for key in _WRITTEN)
