"""A request under way, from admission to its last token: text pieces in order, counts for usage, one line in the log.

Both routes use it, streaming or not, so that all four give the same text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from cupyllm.api.engine_request import EngineRequest
from cupyllm.api.live_request import LiveRequest
from cupyllm.api.protocol.shared import SharedRequest
from cupyllm.api.request_log import RequestLog
from cupyllm.api.state import ServerState
from cupyllm.errors import EngineError
from cupyllm.output import OutputText
from cupyllm.reasoning import ThinkTokens
from cupyllm.sampling_batch import TokenLogprobs
from cupyllm.sequence import FinishReason
from cupyllm.step_result import TokenEvent


@dataclass(frozen=True)
class Delta:
    """What is new in one choice. `finish_reason` is set in the last delta of a choice.

    `logprobs` has one for each of `token_ids`, or is empty when they were not asked for.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs]
    reasoning: str = ""


@dataclass(frozen=True)
class Answer:
    """One choice, complete. `logprobs` is empty when they were not asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs]

    @property
    def mean_logprob(self) -> float:
        """That of its tokens; 0 when log-probabilities were not asked for."""
        return sum(one.logprob for one in self.logprobs) / max(len(self.logprobs), 1)


@dataclass
class _Choice:
    """One answer being written. `unsent_ids` are the tokens whose text has not been shown yet."""

    text: OutputText
    num_tokens: int = 0
    last_token: float | None = None  # when it came, in seconds of time.monotonic
    unsent_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def push(self, number: int, event: TokenEvent) -> Delta | None:
        """The new text, or None while there is none to show.

        Raises DeadEndError or EngineError when the model gave no token.
        """
        if event.finish_reason is FinishReason.ERROR:
            raise event.sequence.dead_end or EngineError(
                "no token could be chosen; the log says why, or the checkpoint or its dtype is damaged"
            )
        if event.token_id is not None:
            self.num_tokens += 1
            self.unsent_ids.append(event.token_id)
        if event.logprobs is not None:
            self.unsent_logprobs.append(event.logprobs)
        new = self.text.push(event)
        reason = self.text.finish_reason
        if not new and reason is None:
            return None
        token_ids, self.unsent_ids = self.unsent_ids, []
        logprobs, self.unsent_logprobs = self.unsent_logprobs, []
        return Delta(number, new.content, token_ids, None if reason is None else reason.value, logprobs, new.reasoning)


class Generation:
    """An admitted request. `close` must be called in the end; it aborts what still runs and writes the log line.

    With `marks`, the model's reasoning is told from its answer.
    """

    def __init__(self, state: ServerState, request: Request, live: LiveRequest, marks: ThinkTokens | None) -> None:
        self._live = live
        self._marks = marks
        self._choices = [
            _Choice(OutputText(state.loaded.tokenizer, params, marks, thinking=thinking))
            for params, thinking in zip(live.asked.params, self._thinking_prompts(), strict=True)
            for _ in range(params.n)
        ]
        self._open_choices = set(range(len(self._choices)))
        self._log = RequestLog(state, request, sum(map(len, live.asked.prompts)))
        self._failed = False
        self._closed = False

    async def deltas(self) -> AsyncIterator[Delta]:
        """The answer as it comes, all choices mixed, until each has ended. Raises DeadEndError and EngineError."""
        while self._open_choices:
            number, event, came = await self._next_event()
            if number not in self._open_choices:
                continue  # it was ended while this token was on its way
            choice = self._choices[number]
            if event.token_id is not None:
                self._log.token(came, choice.last_token)
                if not self._live.asked.beams:  # their tokens come all at once
                    choice.last_token = came
            delta = choice.push(number, event)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self._open_choices.remove(number)
                if event.finish_reason is None:
                    self._live.end_choice(number)  # the engine does not know of stop strings
            yield delta

    def end_choice(self, number: int) -> None:
        """The reader of the deltas has all that it wants of this choice. Harmless when it has ended."""
        if number in self._open_choices:
            self._open_choices.remove(number)
            self._choices[number].text.finish_reason = FinishReason.STOP
            if not self._live.asked.beams:  # a search has given all its tokens when the first comes
                self._live.end_choice(number)

    async def answers(self) -> list[Answer]:
        """All choices, once the last has ended. Raises what `deltas` raises."""
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        async for delta in self.deltas():
            deltas[delta.choice].append(delta)
        return [
            Answer(
                text="".join(delta.text for delta in parts),
                token_ids=[token_id for delta in parts for token_id in delta.token_ids],
                finish_reason=parts[-1].finish_reason or "",
                logprobs=[one for delta in parts for one in delta.logprobs],
            )
            for parts in deltas
        ]

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object. A prompt counts once, however many answers it has; the end token counts, a token
        after a stop string does not.
        """
        prompt = sum(map(len, self._live.asked.prompts))
        output = sum(choice.num_tokens for choice in self._choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._live.num_cached_tokens},
        }
        if self._marks is not None:
            reasoning = sum(choice.text.num_reasoning_tokens for choice in self._choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def prompt_logprobs(self, number: int) -> list[TokenLogprobs | None]:
        """Those of prompt `number`, once its first answer has begun to come; they must have been asked for."""
        readout = self._live.work.prompt_sequences[number].readout
        assert readout is not None
        return readout.logprobs

    def timings(self) -> dict[str, Any]:
        """Where the time of the request went until now: see protocol.answers.Timings."""
        now = time.monotonic()
        first_token = now if self._log.first_token is None else self._log.first_token
        start = self._live.work.started_at
        start = first_token if start is None else start
        return {
            "queue_ms": round(1e3 * (start - self._log.arrived), 3),
            "prefill_ms": round(1e3 * (first_token - start), 3),
            "decode_ms": round(1e3 * (now - first_token), 3),
            "cached_tokens": self._live.num_cached_tokens,
            "preemptions": self._live.work.num_preemptions,
        }

    def close(self) -> None:
        """End the request in the engine and log it. Harmless to call again."""
        if not self._closed:
            self._closed = True
            self._live.close()
            self._log.end([self._live.work], self._reasons(), [choice.num_tokens for choice in self._choices])

    def _thinking_prompts(self) -> list[bool]:
        """Whether each prompt has begun the reasoning."""
        return [self._marks is not None and self._marks.left_open(prompt) for prompt in self._live.asked.prompts]

    async def _next_event(self) -> tuple[int, TokenEvent, float]:
        try:
            number, event, came = await self._live.next_event()
        except EngineError:
            self._failed = True
            raise
        self._failed = self._failed or event.finish_reason is FinishReason.ERROR
        return number, event, came

    def _reasons(self) -> set[FinishReason]:
        """Why the choices ended; one that fails takes the others with it."""
        if self._failed:
            return {FinishReason.ERROR}
        return {choice.text.finish_reason or FinishReason.ABORT for choice in self._choices}


async def start_generation(
    state: ServerState, request: Request, asked: EngineRequest, marks: ThinkTokens | None = None
) -> Generation:
    """Wait until the engine has taken the request. Raises what EngineWorker.submit raises."""
    return Generation(state, request, await state.worker.submit(asked), marks)


def usage_so_far(generation: Generation, ask: SharedRequest) -> dict[str, Any]:
    """The usage of a chunk before the last: null where only the last one's was asked for."""
    if not ask.include_usage:
        return {}
    return {"usage": generation.usage() if ask.continuous_usage else None}


def last_figures(generation: Generation, ask: SharedRequest) -> dict[str, Any]:
    """What the last chunk of a stream holds beside no choices: usage and timings, where they were asked for."""
    usage = {"usage": generation.usage()} if ask.include_usage else {}
    return usage | ({"timings": generation.timings()} if ask.return_timings else {})
