"""What /v1/chat/completions answers, as types; see answers.py."""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired

from cupyllm.api.protocol.answers import Answer, FinishReasonName, PromptLogprobs, Timings, Usage


class ChatTopLogprob(Answer):
    """A token that could have come; `bytes` are its UTF-8 bytes."""

    token: str
    bytes: list[int] | None
    logprob: float


class ChatTokenLogprob(ChatTopLogprob):
    """A token of the answer, with the most likely ones at its place."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob] | None
    refusal: None


class FunctionCall(Answer):
    """`arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(Answer, total=False):
    """The name comes first, then the arguments piece by piece."""

    name: str
    arguments: str


class ToolCallDelta(Answer):
    """A piece of call `index`; `id` and `type` come with the first."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class ChatMessage(Answer):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    token_ids: NotRequired[list[int]]


class ChatCompletion(Answer):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[PromptLogprobs | None]]
    timings: NotRequired[Timings]


class ChatDelta(Answer, total=False):
    """What is new in one answer: the role first, then text; nothing in the last one."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(Answer):
    """A piece of one answer; `finish_reason` is null until its last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(Answer):
    """One event of a streamed answer; one without choices, at the end, has the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    timings: NotRequired[Timings]
