"""What /v1/responses answers, as types: the response, its output items, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired

from cupyllm.api.protocol.answers import Answer
from cupyllm.api.protocol.chat_answers import ChatTokenLogprob
from cupyllm.api.protocol.responses import FunctionTool

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    """A message's text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(Answer):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answer):
    """What the model said."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class Reasoning(Answer):
    """What the model thought before it went on."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    encrypted_content: None
    content: list[ReasoningText]


class OutputFunctionCall(Answer):
    """A call that the model asks for; `arguments` is JSON as it wrote it."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | Reasoning | OutputFunctionCall
Part = OutputText | ReasoningText


class InputTokensDetails(Answer):
    """`cached_tokens` were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """`reasoning_tokens` were spent on thinking."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Answer):
    """Why a response failed; `invalid_prompt` is the one of OpenAI's codes that says that the request was at fault."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class ReasoningEcho(Answer):
    """How much the model was to think."""

    effort: str | None
    summary: None


class TextEcho(Answer):
    """The format that was asked for."""

    format: dict[str, Any]


class Response(Answer):
    """An answer: what was asked for, and the output items in their order."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningEcho
    store: Literal[False]
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class Event(Answer):
    """Base of events, which are numbered from 0."""

    sequence_number: int


class ResponseEvent(Event):
    """The response begins, or has ended."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: Response


class ItemEvent(Event):
    """An output item begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(Event):
    """The part of an item begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: Part


class DeltaEvent(Event):
    """More text of an item, or more of a call's arguments."""

    type: Literal[
        "response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"
    ]
    item_id: str
    output_index: int
    content_index: NotRequired[int]
    delta: str
    logprobs: NotRequired[list[ChatTokenLogprob]]


class TextDoneEvent(Event):
    """The whole text of an item."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: NotRequired[list[ChatTokenLogprob]]


class ArgumentsDoneEvent(Event):
    """All arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    arguments: str


AnyEvent = ResponseEvent | ItemEvent | PartEvent | DeltaEvent | TextDoneEvent | ArgumentsDoneEvent
