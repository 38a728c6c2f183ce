"""Listening and stopping: uvicorn with our own reaction to signals.

The first SIGINT or SIGTERM drains: new requests are refused with 503, running ones may finish, and after
`drain_seconds` the rest end with an error. Then the process ends with exit code 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from cupyllm.api.connection import MAX_HEAD_BYTES, Connection
from cupyllm.api.errors import UnavailableError
from cupyllm.api.worker import EngineWorker
from cupyllm.config import ServerConfig
from cupyllm.errors import ConfigError

log = logging.getLogger(__name__)

# Longer than clients (httpx: 5 s) and proxies (often 60 s) keep an idle connection, so that they close it and never
# send into one that is just being closed.
KEEP_ALIVE_SECONDS = 75
# Once every request has ended: how long answers may take to leave, until their connections are cut.
_FLUSH_SECONDS = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind_socket(host: str, port: int) -> socket.socket:
    """Reserve the port without listening yet: clients are refused until the model is ready. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            # A killed server's port stays in TIME_WAIT for a minute; a new one may take it all the same.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
    return listener


def serve(app: Starlette, listener: socket.socket, config: ServerConfig, *, on_listening: Callable[[], None]) -> None:
    """Serve until a signal says stop; returns when everything has ended. `on_listening` runs when clients can connect.

    Must be called in the main thread, where signals arrive.
    """
    try:
        server = _Server(uvicorn_options(app), on_listening)
        asyncio.run(_serve(server, app.state.server.worker, listener, config.drain_seconds))
    except OSError as error:  # another process listened on the port while the model was loading
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from None


def uvicorn_options(app: Starlette) -> uvicorn.Config:
    """How uvicorn runs our application, by whatever means its server is started."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the address of the client is not used
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: _Server, worker: EngineWorker, listener: socket.socket, drain_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    # What is there now stays. Without this every full collection looks at all of it, while nothing else may run.
    gc.collect()
    gc.freeze()
    with _on_signals(first=lambda: loop.call_soon_threadsafe(stop.set)):
        draining = asyncio.create_task(_drain(server, worker, stop, drain_seconds))
        await server.serve(sockets=[listener])
        draining.cancel()


async def _drain(server: _Server, worker: EngineWorker, stop: asyncio.Event, seconds: float) -> None:
    await stop.wait()
    log.info("stopping: running requests have %g seconds to finish", seconds)
    worker.draining = True
    if not await worker.wait_until_idle(seconds):
        log.warning("%d requests did not finish in time and end with an error", worker.num_live)
        worker.fail_all(UnavailableError("the server is stopping"))
    server.should_exit = True


@contextmanager
def _on_signals(first: Callable[[], object]) -> Iterator[None]:
    """Call `first` on the first SIGINT or SIGTERM and end the process on the second, whatever it is doing."""
    seen = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            os._exit(128 + number)
        seen = True
        first()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
