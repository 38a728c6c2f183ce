"""What the routes answer, as types: /openapi.json is made from them, and the tests hold every answer against that.

The answers themselves are plain dicts, built where they are sent: a type costs a stream nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from typing_extensions import NotRequired, TypedDict

FinishReasonName = Literal["stop", "length", "tool_calls", "content_filter"]


class Answer(TypedDict):
    """Base of them all: an answer has no key that its type has not."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]


class ErrorDetails(Answer):
    """What was wrong, and the request field at fault if it was in one."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(Answer):
    """The body of every answer that is not 200, and the last event of a stream that failed."""

    error: ErrorDetails


class PromptTokensDetails(Answer):
    """`cached_tokens` were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """`reasoning_tokens` were spent on thinking."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts of a request, all its prompts and answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class Timings(Answer):
    """Where a request's time went, in milliseconds: waiting, until its first token, and until its last.

    `preemptions` counts how often its sequences lost their pages and were computed again.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    cached_tokens: int
    preemptions: int


class PromptLogprob(Answer):
    """A token that stands at a place of the prompt, or could; `rank` is null beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = dict[str, PromptLogprob]  # by token id


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


class TextLogprobs(Answer):
    """Log-probabilities of a choice's tokens; four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Answer):
    """One continuation, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[PromptLogprobs | None]]


class TextCompletion(Answer):
    """The continuations of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    timings: NotRequired[Timings]


class TextCompletionChunk(Answer):
    """One event of a streamed continuation; one without choices, at the end, has the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


class Embedding(Answer):
    """A text as a vector: numbers, or the base64 of its little-endian float32 values."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    """Token counts of all texts together."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Answer):
    """The vectors of all texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokens(Answer):
    """A text as token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(Answer):
    """Token ids as a text."""

    prompt: str


class ModelCard(Answer):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Status(Answer):
    """That the server is well."""

    status: Literal["ok", "ready"]


class Version(Answer):
    """The version of cupyllm."""

    version: str
