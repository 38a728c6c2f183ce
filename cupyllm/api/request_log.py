"""What is told of a request that the engine took: its metrics while it runs, and one line in the log when it ends."""

from __future__ import annotations

import logging
import time

from starlette.requests import Request

from cupyllm.api.engine_request import EngineWork
from cupyllm.api.logs import log_fields
from cupyllm.api.state import ServerState
from cupyllm.sequence import FinishReason

log = logging.getLogger(__name__)

# A request with several answers is counted under the reason that says most.
_WEIGHT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


class RequestLog:
    """One request, from when the engine took it to its end. Times are seconds of time.monotonic."""

    def __init__(self, state: ServerState, request: Request, num_prompt_tokens: int) -> None:
        self._metrics = state.metrics
        self._request_id: str = request.state.request_id
        self._route = request.url.path
        self._num_prompt_tokens = num_prompt_tokens
        self._last_token: float | None = None
        self.arrived: float = request.state.arrived
        self.first_token: float | None = None
        request.state.was_started = True  # middleware.py: an error is no refusal any more
        self._metrics.started.inc()
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def token(self, now: float, before: float | None) -> None:
        """A token has come, and the one before it of the same answer, if there was one, at `before`."""
        metrics = self._metrics
        metrics.num_output_tokens += 1
        if before is not None:
            metrics.inter_token_seconds.add(now - before)
        elif self.first_token is None:
            self.first_token = now
            metrics.first_token_seconds.observe(now - self.arrived)
        self._last_token = now

    def end(self, works: list[EngineWork], reasons: set[FinishReason], num_tokens: list[int]) -> None:
        """The request has ended: what it had in the engine, why its answers did, and how many tokens each had.

        To be called once.
        """
        now, figures = time.monotonic(), self._metrics
        started = min((work.started_at for work in works if work.started_at is not None), default=None)
        queue = _seconds(self.arrived, started)
        prefill = None if started is None else _seconds(started, self.first_token)
        decode = None if self.first_token is None else _seconds(self.first_token, self._last_token)
        steps = max(num_tokens, default=0) - 1
        per_token = decode / steps if decode and steps > 0 else None  # beams come all at once
        for histogram, seconds in (
            (figures.queue_seconds, queue),
            (figures.prefill_seconds, prefill),
            (figures.decode_seconds, decode),
            (figures.seconds_per_token, per_token),
            (figures.total_seconds, now - self.arrived),
            (figures.prompt_length, self._num_prompt_tokens),
            (figures.output_length, sum(num_tokens)),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        figures.finish(max(reasons, key=_WEIGHT.index))
        log_fields(
            log,
            {"request_id": self._request_id, "route": self._route},
            {
                "prompt_tokens": self._num_prompt_tokens,
                "cached_tokens": sum(work.num_cached_tokens for work in works),
                "output_tokens": sum(num_tokens),
                "finish": "+".join(sorted(reason.value for reason in reasons)),
                "preemptions": sum(work.num_preemptions for work in works),
                "queue_s": _rounded(queue),
                "ttft_s": _rounded(_seconds(self.arrived, self.first_token)),
                "tpot_s": _rounded(per_token),
                "total_s": _rounded(now - self.arrived),
            },
        )


def _seconds(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
