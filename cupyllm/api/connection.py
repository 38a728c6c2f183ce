"""One HTTP/1.1 connection: uvicorn's, with limits and answers of our own where no request has reached the application.

What h11 cannot read is answered with the error object, as every other error is. A client that takes too long to send
the head of a request, or that goes on sending after its answer, is cut off: connections are not free either.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cupyllm.api.errors import ApiError, error_object, json_response

log = logging.getLogger(__name__)

HEAD_SECONDS = 30.0
MAX_HEAD_BYTES = 64 * 1024


class Connection(H11Protocol):
    """uvicorn makes one for every client that connects."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_client()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when h11 cannot read what came. Where an answer is under way, no other can follow."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = f"req_{uuid.uuid4().hex}"
            log.info("%s refused with 400: not valid HTTP", request_id)
            error = ApiError(400, f"the request is not valid HTTP, or its head is longer than {MAX_HEAD_BYTES} bytes")
            status, body, _ = error_object(error, request_id)
            answer = json_response(body, status=status, headers={"connection": "close", "x-request-id": request_id})
            head = h11.Response(status_code=status, headers=answer.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_client(self) -> None:
        """Start the clock when a head is incomplete, or an answer complete and its request not; else stop it."""
        is_answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        if self.conn.their_state is not h11.IDLE and not is_answered:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
