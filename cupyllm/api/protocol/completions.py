"""/v1/completions: the request's own fields, the four forms of a prompt, and the shape of choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, NoReturn

from pydantic import Field, WithJsonSchema

from cupyllm.api.protocol.shared import SharedRequest
from cupyllm.errors import RequestError
from cupyllm.sampling import MAX_ANSWERS, MAX_LOGPROBS, SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route only
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS,
        {"type": "array", "items": _IDS},
    ]
}


class CompletionRequest(SharedRequest):
    """One prompt or many, as text or as token ids, to be continued."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    best_of: int | None = None

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """The sampling the request asks for, with best_of: more answers than n, and the log-probabilities to choose
        by. Raises RequestError naming the field.
        """
        if self.echo and self.suffix:
            raise RequestError("echo cannot be used with suffix", param="echo")
        params = super().sampling_params(max_tokens)
        if self.echo and self.logprobs is not None:
            params = replace(params, prompt_logprobs=max(self.logprobs, params.prompt_logprobs or 0))
        if self.best_of is None or self.best_of == self.n == 1:
            return params
        if not self.n <= self.best_of <= MAX_ANSWERS:
            raise RequestError(f"best_of must be from n ({self.n}) to {MAX_ANSWERS}", param="best_of")
        if self.stream:
            raise RequestError("best_of cannot be used with stream: the best are known at the end", param="best_of")
        return replace(params, n=self.best_of, logprobs=self.logprobs or 0)

    def prompts(self) -> list[str | list[int]]:
        """The prompts. Raises RequestError naming the place of what is no prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not isinstance(self.prompt, list):
            _refuse("prompt", "must be a string, a list of strings, a list of token ids, or a list of those")
        if not self.prompt:
            _refuse("prompt", "must not be an empty list")
        first = self.prompt[0]
        if isinstance(first, str):
            return [_as_text(item, f"prompt[{place}]") for place, item in enumerate(self.prompt)]
        if isinstance(first, list):
            return [_as_ids(item, f"prompt[{place}]") for place, item in enumerate(self.prompt)]
        return [_as_ids(self.prompt, "prompt")]


def text_choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    """A choice of an answer or of a chunk."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _as_text(item: Any, place: str) -> str:
    if not isinstance(item, str):
        _refuse(place, "must be a string, as prompt[0] is")
    return item


def _as_ids(item: Any, place: str) -> list[int]:
    if not isinstance(item, list):
        _refuse(place, "must be a list of token ids, as prompt[0] is")
    for position, token_id in enumerate(item):
        if type(token_id) is not int:
            _refuse(f"{place}[{position}]", "must be a token id: a whole number")
    return item


def _refuse(place: str, problem: str) -> NoReturn:
    raise RequestError(f"{place} {problem}", param="prompt")
