"""The `input` of /v1/responses: what its items may hold, and the chat messages they become.

An item is a message, reasoning, a call of a function, or the output of one. What the model did in one turn stands in
several items but is one message to a chat template: reasoning, then a message, then calls.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError

from cupyllm.api.protocol.shared import Ignored, ShownAs, StrictModel, as_request_error
from cupyllm.errors import RequestError

Json = dict[str, Any]


class TextInput(StrictModel):
    """A piece of text: `input_text` of the user, `output_text` of the model, or `reasoning_text`."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


Text = Annotated[Any, ShownAs(str | list[TextInput])]


class MessageInput(StrictModel):
    """What was said. `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class ReasoningInput(StrictModel):
    """What the model thought; without `content` it says nothing. Encrypted reasoning cannot be read."""

    type: Literal["reasoning"]
    content: Annotated[list[Any] | None, ShownAs(list[TextInput] | None)] = None
    summary: Ignored = None
    id: Ignored = None
    encrypted_content: Ignored = None
    status: Ignored = None


class FunctionCallInput(StrictModel):
    """A call that the model made; `arguments` is JSON."""

    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: Ignored = None
    status: Ignored = None


class FunctionOutputInput(StrictModel):
    """What the function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    id: Ignored = None
    name: Ignored = None
    status: Ignored = None


InputItem = MessageInput | ReasoningInput | FunctionCallInput | FunctionOutputInput
_KINDS: dict[str, type[InputItem]] = {
    "message": MessageInput,
    "reasoning": ReasoningInput,
    "function_call": FunctionCallInput,
    "function_call_output": FunctionOutputInput,
}
ModelT = TypeVar("ModelT", bound=StrictModel)


class Conversation:
    """The chat messages that instructions and `input` become.

    names  what chat calls a text, such as "messages[1].content" -> what it is called here, such as "input[0].content"
    """

    def __init__(self, instructions: str | None, given: object) -> None:
        """Raises RequestError, its `param` such as "input[2].content"."""
        self.messages: list[Json] = []
        self.names: dict[str, str] = {}
        if instructions is not None:
            self._add({"role": "system"}, "content", instructions, "instructions")
        if isinstance(given, str):
            self._add({"role": "user"}, "content", given, "input")
        elif isinstance(given, list):
            for place, value in enumerate(given):
                self._add_item(_read_item(value, f"input[{place}]"), f"input[{place}]")
        else:
            _refuse("input", "must be a string or a list of items")
        if not self.messages:
            _refuse("input", "must hold at least one item, or there must be instructions")

    def _add_item(self, item: InputItem, path: str) -> None:
        """Put an item behind the messages, or into the last one if that is the same turn of the model's."""
        match item:
            case MessageInput(role="assistant"):
                begun = self.messages and self.messages[-1].keys() == {"role", "reasoning_content"}
                text = _text(item.content, f"{path}.content")
                self._add(None if begun else {"role": "assistant"}, "content", text, f"{path}.content")
            case MessageInput():
                self._add({"role": item.role}, "content", _text(item.content, f"{path}.content"), f"{path}.content")
            case ReasoningInput():
                if text := _text(item.content or [], f"{path}.content"):
                    self._add({"role": "assistant"}, "reasoning_content", text, f"{path}.content")
            case FunctionCallInput():
                self._add_call(item, path)
            case FunctionOutputInput():
                text = _text(item.output, f"{path}.output")
                self._add({"role": "tool", "tool_call_id": item.call_id}, "content", text, f"{path}.output")
                self.names[f"{self._last}.tool_call_id"] = f"{path}.call_id"

    def _add_call(self, item: FunctionCallInput, path: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant"})
        calls = self.messages[-1].setdefault("tool_calls", [])
        call = f"{self._last}.tool_calls[{len(calls)}]"
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
        for key, own in (("id", "call_id"), ("function.name", "name"), ("function.arguments", "arguments")):
            self.names[f"{call}.{key}"] = f"{path}.{own}"

    def _add(self, message: Json | None, key: str, text: str, path: str) -> None:
        """Add a message, or go on with the last one, and give it a text."""
        if message is not None:
            self.messages.append(message)
        self.messages[-1][key] = text
        self.names[f"{self._last}.{key}"] = path

    @property
    def _last(self) -> str:
        return f"messages[{len(self.messages) - 1}]"


def _read_item(value: object, path: str) -> InputItem:
    if not isinstance(value, dict):
        _refuse(path, "must be an object")
    kind = value.get("type") or "message"
    if kind == "item_reference":
        _refuse(path, "refers to an item that is kept nowhere; send the item itself")
    if not isinstance(kind, str) or kind not in _KINDS:
        _refuse(f"{path}.type", f"is {kind!r:.80}; supported: {', '.join(_KINDS)}")
    return read_object(_KINDS[kind], value, path)


def _text(value: object, path: str) -> str:
    """A string, or the texts of a list of parts with nothing between."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse(path, "must be a string or a list of parts")
    return "".join(_read_part(part, f"{path}[{place}]").text for place, part in enumerate(value))


def _read_part(value: object, path: str) -> TextInput:
    if not isinstance(value, dict):
        _refuse(path, "must be an object")
    kinds = ("input_text", "output_text", "reasoning_text", "text")
    if value.get("type") not in kinds:
        _refuse(f"{path}.type", f"is {value.get('type')!r:.80}; this model takes text only: {', '.join(kinds)}")
    return read_object(TextInput, value, path)


def read_object(kind: type[ModelT], value: Json, path: str) -> ModelT:
    """One object inside a body; null counts as absent. Raises RequestError naming the place."""
    try:
        return kind.model_validate({name: item for name, item in value.items() if item is not None})
    except ValidationError as error:
        raise as_request_error(error, path) from None


def _refuse(path: str, problem: str) -> NoReturn:
    raise RequestError(f"{path} {problem}", param=path)
