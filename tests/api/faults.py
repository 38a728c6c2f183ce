"""Ops that a test can stop, step by step, or make fail: the engine and everything around it stay real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from cupyllm.startup import LoadedModel
from tests.api.live_server import LiveServer, wait_until


class FaultyOps:
    """Passes everything on to real ops; `before_step(number)` runs first in every step, numbered from 1."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._ops = loaded.engine.ops
        loaded.engine.ops = self
        self.before_step: Callable[[int], None] = lambda number: None
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def embedding(self, *arguments: Any, **options: Any) -> Any:
        self.num_steps += 1
        self.before_step(self.num_steps)
        return self._ops.embedding(*arguments, **options)


class Turnstile:
    """Lets steps pass one by one while it is closed. Opened again, it lets everything pass."""

    def __init__(self, ops: FaultyOps) -> None:
        self._ops = ops
        self._permits = threading.Semaphore(0)
        self.num_arrived = self.num_passed = 0

    def __enter__(self) -> Turnstile:
        self._ops.before_step = self._wait
        return self

    def __exit__(self, *_: object) -> None:
        self._ops.before_step = lambda number: None
        self._permits.release(1000)

    def let_pass(self, count: int = 1) -> None:
        self._permits.release(count)

    def shut(self) -> None:
        """Take back what no step has used; returns when a step stands before the turnstile."""
        while self._permits.acquire(blocking=False):
            pass
        wait_until(lambda: self.num_arrived > self.num_passed, "a step waits")

    def _wait(self, number: int) -> None:
        self.num_arrived += 1
        assert self._permits.acquire(timeout=60), "the test forgot to open the turnstile"
        self.num_passed += 1


def pass_until(turnstile: Turnstile, holds: Callable[[], bool]) -> None:
    """Let steps pass until `holds`."""

    def look() -> bool:
        turnstile.let_pass()
        return holds()

    wait_until(look, "the engine has come so far")


def start_stream(server: LiveServer, turnstile: Turnstile, pool: ThreadPoolExecutor, body: Any) -> httpx.Response:
    """Open a stream of text completions; returns when its headers are there, so the engine has taken the request."""
    request = server.http.build_request("POST", f"{server.url}/v1/completions", json=body | {"stream": True})
    future: Future[httpx.Response] = pool.submit(server.http.send, request, stream=True)
    pass_until(turnstile, future.done)
    return future.result()
