"""/v1/completions: the request's own fields, the four forms of a prompt, and the shape of choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from cupyllm.api.protocol.prompts import Prompts, read_prompts
from cupyllm.api.protocol.shared import SharedRequest
from cupyllm.errors import RequestError
from cupyllm.sampling import MAX_ANSWERS, MAX_LOGPROBS, SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route only


class CompletionRequest(SharedRequest):
    """One prompt or many, as text or as token ids, to be continued."""

    prompt: Prompts
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
        return read_prompts(self.prompt, "prompt")


def text_choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    """A choice of an answer or of a chunk."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
