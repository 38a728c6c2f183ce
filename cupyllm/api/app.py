"""The Starlette application: routes, what stands around them, and the engine thread's life."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from cupyllm.api import chat, completions, embeddings, health, live_view, models, openapi, responses, tokenize
from cupyllm.api.errors import routing_error
from cupyllm.api.metrics import Metrics
from cupyllm.api.middleware import OPEN_PATHS, AccessCheck, Errors, RequestIds
from cupyllm.api.state import ServerState, served_name
from cupyllm.api.worker import EngineWorker
from cupyllm.config import ServerConfig
from cupyllm.errors import ConfigError
from cupyllm.startup import LoadedModel
from cupyllm.trace_writer import TraceWriter

_FAMILIES = (chat, completions, responses, embeddings, tokenize, models, health, openapi)


def make_app(loaded: LoadedModel, config: ServerConfig) -> Starlette:
    """The server's application; the engine thread starts and ends with it. Raises ConfigError for unusable API keys."""
    keys = _read_api_keys(config.api_key_env)
    families = (*_FAMILIES, live_view) if config.live_view else _FAMILIES
    worker = EngineWorker(loaded.engine, watchdog_seconds=config.watchdog_seconds)
    trace_writer = None if config.trace is None else TraceWriter(Path(config.trace))
    if trace_writer is not None:
        worker.trace.listen(trace_writer.record)  # the engine thread has not begun
    app = Starlette(
        routes=[route for family in families for route in family.routes()],
        middleware=_middleware(config, keys),
        exception_handlers={HTTPException: routing_error},
        lifespan=_engine_thread,
    )
    app.router.redirect_slashes = False  # a wrong path is a 404, not a redirect that drops the body
    app.state.trace_writer = trace_writer
    metrics = Metrics(worker, served_name(config))
    app.state.server = ServerState(config, loaded, worker, metrics, created=int(time.time()), needs_key=bool(keys))
    app.state.watching = live_view.Watching(worker)
    return app


@asynccontextmanager
async def _engine_thread(app: Starlette) -> AsyncIterator[None]:
    worker: EngineWorker = app.state.server.worker
    worker.start()
    yield
    await worker.stop()
    if app.state.trace_writer is not None:
        app.state.trace_writer.close()


def _middleware(config: ServerConfig, keys: tuple[bytes, ...]) -> list[Middleware]:
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's JavaScript client sends many x-stainless-* headers
        expose_headers=["x-request-id", "retry-after"],
    )
    open_paths = OPEN_PATHS | (live_view.open_paths() if config.live_view else frozenset())
    return [
        Middleware(RequestIds),
        *([cors] if config.cors_origins else []),
        Middleware(Errors),
        Middleware(AccessCheck, keys=keys, open_paths=open_paths, host=config.host),
    ]


def _read_api_keys(variable: str) -> tuple[bytes, ...]:
    """The comma-separated keys in an environment variable; none when it is not set or empty."""
    value = os.environ.get(variable, "")
    keys = tuple(key.strip().encode() for key in value.split(",") if key.strip())
    if value and not keys:
        raise ConfigError(f"the environment variable {variable} is set but holds no API key; unset it or set a key")
    return keys
