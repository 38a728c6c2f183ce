"""GET /, /static/{name} and /live/steps: the page that chats and shows the engine at work, and the steps that it shows.

The page and its files hold nothing of the server's, so they come without an API key; all that the page asks for, the
steps included, needs one. Browsers cannot send a header with an EventSource: the page reads the stream with fetch.

Watching is bounded. Steps are recorded once for all who watch, while anybody does, and the last 500 are kept. Every
stream takes from there what is new, ten times a second; one that falls further behind begins anew with a snapshot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cupyllm.api.errors import ApiError
from cupyllm.api.sse import EventStream
from cupyllm.api.state import ServerState, server_state
from cupyllm.api.worker import EngineWorker
from cupyllm.step_trace import Snapshot, StepRecord

STEPS_KEPT = 500
MAX_WATCHERS = 8
PERIOD_SECONDS = 0.1
IDLE_SECONDS = 1.0
_STATIC = Path(__file__).parent / "static"
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes() -> list[Route]:
    return [
        Route("/", page, methods=["GET"]),
        Route("/static/{name}", static_file, methods=["GET"]),
        Route("/live/steps", live_steps, methods=["GET"]),
    ]


def open_paths() -> frozenset[str]:
    """The paths that need no key."""
    return frozenset({"/", *(f"/static/{path.name}" for path in _STATIC.iterdir())})


async def page(request: Request) -> Response:
    """The live page: a chat, and the engine at work on it."""
    return _file("index.html")


async def static_file(request: Request) -> Response:
    """A file of the live page."""
    return _file(request.path_params["name"])


async def live_steps(request: Request) -> ASGIApp:
    """What the engine does from now on, as events: a snapshot, then its steps, ten times a second."""
    watching: Watching = request.app.state.watching
    await request.body()
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    watching.come()
    return EventStream(watching.events(server_state(request)), close=watching.leave, named=True)


class Watching:
    """The steps that were recorded last, and how many streams show them."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)  # the engine thread appends to it
        self._num_watchers = 0

    def come(self) -> None:
        """One more stream. Raises ApiError (429) when there are enough."""
        if self._num_watchers == MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} pages watch already; close one", code="too_many_watchers")
        self._num_watchers += 1
        if self._num_watchers == 1:
            self._worker.post(lambda: self._worker.trace.listen(self._steps.append))

    def leave(self) -> None:
        """One stream less; without any, nothing is recorded."""
        self._num_watchers -= 1
        if self._num_watchers == 0:
            self._worker.post(lambda: self._worker.trace.unlisten(self._steps.append))

    async def events(self, state: ServerState) -> AsyncIterator[dict[str, Any]]:
        """A snapshot, the steps since, and another snapshot whenever the stream falls behind."""
        loop = asyncio.get_running_loop()
        steps: list[StepRecord] | None = None
        last, told = None, loop.time()
        while not self._worker.draining:
            if steps is None:
                snapshot, last = await self._worker.call(self._stand)
                yield _snapshot_event(snapshot, state)
            steps = self._since(last)
            if steps:
                yield {"type": "steps", "steps": _changes(steps)}
                last, told = steps[-1], loop.time()
            elif loop.time() - told > IDLE_SECONDS:  # sequences may have been aborted since the last step
                await self._worker.call(self._worker.trace.note_changes)
                told = loop.time()
            await asyncio.sleep(PERIOD_SECONDS)

    def _stand(self) -> tuple[Snapshot, StepRecord | None]:
        """Where the engine stands, and the last record before that."""
        snapshot = self._worker.trace.snapshot()
        return snapshot, self._steps[-1] if self._steps else None

    def _since(self, last: StepRecord | None) -> list[StepRecord] | None:
        """The steps recorded after `last`; None when some of them are not kept any more."""
        kept = list(self._steps)
        for place in range(len(kept) - 1, -1, -1):
            if kept[place] is last:
                return kept[place + 1 :]
        return kept if last is None and len(kept) < STEPS_KEPT else None


def _snapshot_event(snapshot: Snapshot, state: ServerState) -> dict[str, Any]:
    limits = {
        "max_decode_batch_size": state.config.max_decode_batch_size,
        "max_step_tokens": state.config.max_step_tokens,
        "max_waiting": state.config.max_waiting,
        "max_model_len": state.loaded.engine.max_model_len,
    }
    return {"type": "snapshot", "snapshot": vars(snapshot), "limits": limits}


def _changes(steps: list[StepRecord]) -> list[dict[str, Any]]:
    """The first step whole, and of each other one what is not as in the step before: mostly its number and times."""
    told = [steps[0]._asdict()]
    for before, step in pairwise(steps):
        told.append({name: new for name, old, new in zip(step._fields, before, step, strict=True) if new != old})
    return told


def _file(name: str) -> Response:
    path = next((path for path in _STATIC.iterdir() if path.name == name and path.suffix in _MEDIA_TYPES), None)
    if path is None:
        raise ApiError(404, f"there is no file /static/{name[:200]}")
    return Response(path.read_bytes(), media_type=_MEDIA_TYPES[path.suffix], headers=_HEADERS)
