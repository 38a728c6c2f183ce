"""What /v1/completions answers, as types; see answers.py."""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired

from cupyllm.api.protocol.answers import Answer, FinishReasonName, PromptLogprobs, Timings, Usage


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
