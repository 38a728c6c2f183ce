"""What the routes answer, as types: /openapi.json is made from them, and the tests hold every answer against that.

The answers themselves are plain dicts, built where they are sent: a type costs a stream nothing. Here is what several
routes share, and the routes that generate nothing; those that do are in chat_answers.py, text_answers.py and
response_answers.py.
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
