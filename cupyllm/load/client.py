"""One request sent and its answer timed. Whatever goes wrong is an outcome, too: nothing is raised and nothing lost."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import h11

from cupyllm.errors import ConfigError
from cupyllm.load.connection import ClosedByServerError, Connection, Target
from cupyllm.load.events import DONE, EventSplitter, error_message, read_event

MESSAGE_CHARACTERS = 160


@dataclass
class Outcome:
    """What became of a request. Times are seconds of time.perf_counter().

    `due_at` is when it was to be sent; every latency counts from there. `text_times` are the arrivals of events with
    text: mostly one token each. `output_tokens` is what the server counted, and None where it did not.
    """

    due_at: float
    sent_at: float = 0.0
    ended_at: float = 0.0
    text_times: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens: those that the server counted, else the events with text."""
        return len(self.text_times) if self.output_tokens is None else self.output_tokens

    @property
    def time_to_first_token(self) -> float:
        return self.text_times[0] - self.due_at

    @property
    def end_to_end(self) -> float:
        """From when it was due to the last token."""
        return self.text_times[-1] - self.due_at

    @property
    def time_per_output_token(self) -> float | None:
        """The mean time of the tokens after the first; None where there is only one."""
        if self.num_tokens < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.num_tokens - 1)


class Client:
    """Sends requests to one server over connections that it keeps."""

    def __init__(self, target: Target, *, timeout: float = 600.0) -> None:
        self._target = target
        self._timeout = timeout
        self._idle: list[Connection] = []

    async def answer(self, path: str, body: bytes, due_at: float) -> Outcome:
        """Post a streamed request and read its answer to the end."""
        outcome = Outcome(due_at)
        try:
            await asyncio.wait_for(self._exchange(path, body, outcome), self._timeout)
        except asyncio.TimeoutError:
            outcome.error = f"no answer within {self._timeout:g} s"
        except (OSError, h11.RemoteProtocolError) as error:
            outcome.error = f"connection: {error}"
        outcome.ended_at = time.perf_counter()
        if outcome.error is None and not outcome.text_times:
            outcome.error = "an answer without text"
        return outcome

    async def first_model(self) -> str:
        """The name of the first model that the server lists. Raises ConfigError where there is none to be had."""
        try:
            status, content = await asyncio.wait_for(self._get("/v1/models"), self._timeout)
            if status == 200:
                return str(json.loads(content)["data"][0]["id"])
            problem = f"status {status}: {_refusal(content)}"
        except (OSError, asyncio.TimeoutError, h11.RemoteProtocolError) as error:
            problem = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError):
            problem = "what it answers is not a list of models"
        raise ConfigError(f"GET /v1/models of {self._target.host}:{self._target.port} failed: {problem}")

    async def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            connection = self._idle.pop()
            connection.close()
            await connection.wait_closed()

    async def _get(self, path: str) -> tuple[int, bytes]:
        connection = await Connection.open(self._target)
        try:
            status = await connection.request("GET", path)
            return status, b"".join([data async for data in connection.body()])
        finally:
            connection.close()
            await connection.wait_closed()

    async def _exchange(self, path: str, body: bytes, outcome: Outcome) -> None:
        outcome.sent_at = time.perf_counter()
        connection, status = await self._request(path, body)
        try:
            if status == 200:
                await _read_stream(connection, outcome)
            else:
                content = b"".join([data async for data in connection.body()])
                outcome.error = f"status {status}: {_refusal(content)}"
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)

    async def _request(self, path: str, body: bytes) -> tuple[Connection, int]:
        """Send on a kept connection, or on a new one where the kept one turns out to have been closed meanwhile."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await connection.request("POST", path, body)
            except ClosedByServerError as error:
                connection.close()
                if not error.unused:
                    raise
            except BaseException:
                connection.close()
                raise
        connection = await Connection.open(self._target)
        try:
            return connection, await connection.request("POST", path, body)
        except BaseException:
            connection.close()
            raise


async def _read_stream(connection: Connection, outcome: Outcome) -> None:
    events = EventSplitter()
    complete = False
    async for received in connection.body():
        for data in events.feed(received):
            if data == DONE:
                complete = True
                continue
            event = read_event(data)
            if event.error is not None:
                outcome.error = f"error event: {event.error[:MESSAGE_CHARACTERS]}"
            if event.has_text:
                outcome.text_times.append(connection.received_at)
            if event.prompt_tokens is not None:
                outcome.prompt_tokens = event.prompt_tokens
            if event.output_tokens is not None:
                outcome.output_tokens = event.output_tokens
            complete = complete or event.is_last
    if not complete and outcome.error is None:
        outcome.error = "the stream ended before the answer did"


def _refusal(content: bytes) -> str:
    try:
        return error_message(json.loads(content))[:MESSAGE_CHARACTERS]
    except ValueError:
        return content[:MESSAGE_CHARACTERS].decode(errors="replace")
