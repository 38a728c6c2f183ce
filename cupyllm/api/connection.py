"""One HTTP/1.1 connection: uvicorn's, with limits and answers of our own where no request has reached the application.

What h11 cannot read is answered with the error object, as every other error is. A client that takes too long to send
the head of a request, that goes on sending after its answer, or that does not read, is cut off: connections are not
free either.

h11 and not the faster httptools: of a streamed chunk's time it takes a tenth, most is the system call that sends it
(benchmarks/api_overhead.py); and h11 bounds heads and refuses what is ambiguous by itself.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cupyllm.api.errors import ApiError, error_object, json_response
from cupyllm.api.state import state_of

log = logging.getLogger(__name__)

HEAD_SECONDS = 30.0
WRITE_SECONDS = 30.0
MAX_HEAD_BYTES = 64 * 1024
SEND_BUFFER_BYTES = 128 * 1024  # Linux doubles it for its own needs


class Connection(H11Protocol):
    """uvicorn makes one for every client that connects."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A client that reads slowly fills the kernel's buffer, and then its stream waits (`send` does).
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        transport.set_write_buffer_limits(high=0)
        self._watch_client()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()
        self._stop_write_timer()

    def pause_writing(self) -> None:
        """asyncio calls this when the kernel takes no more."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """asyncio calls this when the kernel has taken everything."""
        super().resume_writing()
        self._stop_write_timer()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when h11 cannot read what came. Where an answer is under way, no other can follow."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            request_id = f"req_{uuid.uuid4().hex}"
            log.info("%s refused with 400: not valid HTTP", request_id)
            state_of(self.config.app).metrics.refuse(400)
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
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self._check_reader, unread)

    def _check_reader(self, unread_before: int) -> None:
        """Cut off a client that has read nothing since. Closing would wait for it: there are bytes left to send."""
        if self.transport.get_write_buffer_size() < unread_before:
            self._watch_reader()
        else:
            log.info("a client has read nothing for %g s and is cut off", WRITE_SECONDS)
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
