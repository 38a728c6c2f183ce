"""One HTTP/1.1 connection to a server, kept alive from request to request: asyncio's streams, parsed by h11."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass

import h11

from cupyllm.errors import ConfigError

READ_BYTES = 65536


@dataclass(frozen=True)
class Target:
    """Where a server is: `path` stands before "/v1/...", `api_key` is sent as a bearer token where there is one."""

    host: str
    port: int
    tls: bool = False
    path: str = ""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """From "http://host:port", with or without "/v1" at its end. Raises ConfigError."""
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"the URL {url!r} cannot be used: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"the URL {url!r} cannot be used: expected one such as http://127.0.0.1:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, parts.scheme == "https", path, api_key)


class ClosedByServerError(ConnectionError):
    """The connection ended before the answer did. `unused`: before its first byte, so nothing was lost."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__("the server closed the connection")
        self.unused = unused


class Connection:
    """One request at a time. `is_open` says whether another may follow."""

    def __init__(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._target = target
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self.is_open = True
        self.received_at = 0.0  # time.perf_counter() when the last bytes came
        self._num_received = 0

    @classmethod
    async def open(cls, target: Target) -> Connection:
        """Connect. Raises OSError."""
        context = ssl.create_default_context() if target.tls else None
        return cls(target, *await asyncio.open_connection(target.host, target.port, ssl=context))

    async def request(self, method: str, path: str, body: bytes = b"") -> int:
        """Send a request and wait for the head of its answer; returns the status. Then read `body`."""
        self._num_received = 0
        headers = [("host", f"{self._target.host}:{self._target.port}"), ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "application/json"))
        if self._target.api_key is not None:
            headers.append(("authorization", f"Bearer {self._target.api_key}"))
        request = h11.Request(method=method, target=self._target.path + path, headers=headers)
        head, end = self._http.send(request), self._http.send(h11.Data(data=body)) if body else b""
        self._writer.write((head or b"") + (end or b"") + (self._http.send(h11.EndOfMessage()) or b""))
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                return event.status_code
            assert isinstance(event, h11.InformationalResponse), event

    async def body(self) -> AsyncIterator[bytes]:
        """The answer's bytes as they come; afterwards the connection takes the next request, if the server agrees."""
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self.close()

    def close(self) -> None:
        self.is_open = False
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event that is there or comes; never NEED_DATA."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(READ_BYTES)
                self.received_at = time.perf_counter()
                if not data and self._num_received == 0:
                    raise ClosedByServerError(unused=True)
                self._num_received += len(data)
                self._http.receive_data(data)  # no data: the end, with which some answers end, and others are cut off
        except ConnectionResetError:
            raise ClosedByServerError(unused=self._num_received == 0) from None
        return event
