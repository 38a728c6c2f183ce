"""How many sequences wait, known to the event loop without asking the engine thread, which is busy with a step."""

from __future__ import annotations

import threading

from cupyllm.engine import Engine
from cupyllm.errors import QueueFullError


class WaitingCount:
    """Refuses at once what the engine would refuse after the step in progress.

    The engine has the last word. Here are counted those it knows of and those on their way to it; sequences of requests
    that have ended may still be among them, and each may be one that waits or one that runs. All these are taken off,
    so that a refusal is never wrong, and what it lets pass may still be refused.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._coming = 0
        self._leaving = 0

    def come(self, count: int) -> None:
        """So many more are to wait. Raises QueueFullError when they cannot."""
        most = self._engine.config.max_waiting
        with self._lock:
            waiting = self._engine.num_waiting + self._coming - self._leaving
            if waiting + count > most:
                raise QueueFullError(waiting, most)
            self._coming += count

    def taken(self, count: int) -> None:
        """The engine thread is about to give so many to the engine."""
        with self._lock:
            self._coming -= count

    def leave(self, count: int) -> None:
        """So many have ended, which the engine has not been told yet."""
        with self._lock:
            self._leaving += count

    def left(self, count: int) -> None:
        """The engine has been told of so many."""
        with self._lock:
            self._leaving -= count
