"""Server-sent events, as the OpenAI API uses them, and what to do when the client leaves.

Every event is one `data: JSON` line and a blank line. On success the last one is `data: [DONE]`. After a failure the
last one is `data: {"error": {...}}`, and no [DONE] follows: the official client raises on the error and reads no more,
and a reader that only waits for [DONE] must not take a failure for success. A comment line goes out when nothing else
has for 15 seconds, so that nobody on the way takes a long prompt for a dead connection.

A client that reads slowly holds up its own stream only: `send` waits until the kernel has taken what came before.
connection.py gives it up when it reads nothing at all, live_request.py when too many tokens wait for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cupyllm.api.errors import error_object

KEEP_ALIVE_SECONDS = 15.0
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
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._write(scope["state"]["request_id"], send))
        except ClientDisconnect:
            return  # nobody reads any more
        finally:
            self._close()

    async def _write(self, request_id: str, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        self._last_sent = time.monotonic()
        keeping_alive = asyncio.ensure_future(self._fill_pauses(send))
        try:
            async for frame in self._frames:
                await self._send(send, _event(frame))
            if not self._named:
                await self._send(send, "data: [DONE]\n\n")
        except Exception as error:
            _, body, _ = error_object(error, request_id)
            await self._send(send, _event(body))
        finally:
            keeping_alive.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        self._last_sent = time.monotonic()

    async def _fill_pauses(self, send: Send) -> None:
        """Comment lines; a task beside the writer, because a timer for every event would cost more than the event."""
        while True:
            due = self._last_sent + KEEP_ALIVE_SECONDS
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self._last_sent + KEEP_ALIVE_SECONDS <= time.monotonic():
                await self._send(send, ": keep-alive\n\n")


def _event(frame: dict[str, Any]) -> str:
    name = f"event: {frame['type']}\n" if "type" in frame else ""
    return f"{name}data: {json.dumps(frame, ensure_ascii=False, allow_nan=False)}\n\n"
