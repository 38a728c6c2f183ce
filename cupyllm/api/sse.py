"""Server-sent events, as the OpenAI API uses them, and what to do when the client leaves.

Every event is one `data: JSON` line and a blank line. On success the last one is `data: [DONE]`. After a failure the
last one is `data: {"error": {...}}`, and no [DONE] follows: the official client raises on the error and reads no more,
and a reader that only waits for [DONE] must not take a failure for success. A comment line goes out when nothing else
has for 15 seconds, so that nobody on the way takes a long prompt for a dead connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cupyllm.api.errors import error_object

KEEP_ALIVE_SECONDS = 15.0
WRITE_SECONDS = 30.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx to pass events on at once
]
T = TypeVar("T")


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. When the client closes the connection first, `work` is cancelled: ClientDisconnect.

    To be used once the body has been read: from then on the only message to come is the disconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream:
    """An answer that sends each of `frames` as an event. `close` is called at the end, however it comes.

    `named` events are those of /v1/responses: their type stands before the data, and the last one ends the stream.
    """

    def __init__(
        self, frames: AsyncIterator[dict[str, Any]], close: Callable[[], None], *, named: bool = False
    ) -> None:
        self._frames = frames
        self._close = close
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._write(scope["state"]["request_id"], send))
        except (ClientDisconnect, TimeoutError):
            return  # nobody reads any more
        finally:
            self._close()

    async def _write(self, request_id: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        try:
            async for line in _with_keep_alive(self._frames):
                await _send(send, line)
            if not self._named:
                await _send(send, "data: [DONE]\n\n")
        except TimeoutError:
            raise
        except Exception as error:
            _, body, _ = error_object(error, request_id)
            await _send(send, _event(body))
        await send({"type": "http.response.body", "body": b""})


async def _send(send: Send, text: str) -> None:
    """Send a piece; a client that has read nothing for 30 seconds is given up with TimeoutError."""
    with anyio.fail_after(WRITE_SECONDS):
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _with_keep_alive(frames: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """The frames as events, with comment lines in long pauses."""
    while True:
        upcoming = asyncio.ensure_future(_next_or_none(frames))
        try:
            while not (await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_SECONDS))[0]:
                yield ": keep-alive\n\n"
        finally:
            upcoming.cancel()
        frame = upcoming.result()
        if frame is None:
            return
        yield _event(frame)


async def _next_or_none(frames: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(frames, None)


def _event(frame: dict[str, Any]) -> str:
    name = f"event: {frame['type']}\n" if "type" in frame else ""
    return f"{name}data: {json.dumps(frame, ensure_ascii=False, allow_nan=False)}\n\n"
