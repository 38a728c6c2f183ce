"""What an assistant's message is made of, in the pieces in which it arrives.

The pieces of one message, put together, do not depend on how the text was cut: joined they give the same message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReasoningText:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool begins. Calls are numbered from 0; ids are random."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: JSON text, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The arguments of a call are complete. A call whose answer ends before has no such piece."""

    index: int


MessagePart = ReasoningText | ContentText | CallBegin | CallArguments | CallEnd


@dataclass
class ToolCall:
    """A call of a tool. `arguments` is JSON text; valid JSON unless the model made a mistake or was cut off."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """An assistant's message. `reasoning` and `content` are "" where there is none."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[MessagePart]) -> None:
        """Put the next pieces in their places."""
        for part in parts:
            match part:
                case ReasoningText(text):
                    self.reasoning += text
                case ContentText(text):
                    self.content += text
                case CallBegin(_, call_id, name):
                    self.tool_calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    self.tool_calls[index].arguments += text
