"""The messages of a conversation as types, for /openapi.json. cupyllm/messages.py states the rules, and checks them."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict


class TextPart(TypedDict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class InputMessage(TypedDict):
    """Instructions (`developer` is the same as `system`), or what the user says."""

    role: Literal["system", "developer", "user"]
    content: str | list[TextPart]
    name: NotRequired[str | None]


class CalledFunction(TypedDict):
    """`arguments` is a JSON object, or a string that holds one."""

    name: str
    arguments: NotRequired[str | dict[str, Any] | None]


class PastToolCall(TypedDict):
    """A call that the model made."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """What the model said; with `tool_calls` the content may be null."""

    role: Literal["assistant"]
    content: NotRequired[str | list[TextPart] | None]
    name: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[PastToolCall] | None]


class ToolMessage(TypedDict):
    """What a tool answered."""

    role: Literal["tool"]
    content: str | list[TextPart]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]


Message = InputMessage | AssistantMessage | ToolMessage
