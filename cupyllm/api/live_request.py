"""What the event loop holds of a request that is inside the engine. worker.py makes these and feeds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cupyllm.api.engine_request import EngineRequest, EngineWork
from cupyllm.api.errors import ApiError
from cupyllm.step_result import TokenEvent

# So many values may wait for a client that reads slower than the model writes, for each choice: a token is one value
# and each of its top log-probabilities another, some hundred bytes all. Then the request ends with an error.
MAX_UNREAD = 8192

# What the engine thread delivers first, once it has taken a request.
ADMITTED = object()


class LiveRequest:
    """One request inside the engine: P prompts, n answers to each, so P * n choices. Belongs to the event loop.

    Choice p * n + k is answer k to prompt p.

    Whoever holds it must call `close` in the end; closing before all choices have ended aborts what still runs.
    """

    def __init__(
        self,
        asked: EngineRequest,
        *,
        abort: Callable[[LiveRequest, int], None],
        forget: Callable[[LiveRequest], None],
    ) -> None:
        self.asked = asked
        self.work = EngineWork(asked)  # of the engine thread
        self._abort = abort
        self._forget = forget
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        values_per_token = 1 + max(params.logprobs or 0 for params in asked.params)
        # The answers of a beam search come all at once, and no more can follow.
        self._most_unread = None if asked.beams else MAX_UNREAD * asked.num_waiting // values_per_token

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of all prompts were found in the prefix cache."""
        return self.work.num_cached_tokens

    async def admitted(self) -> None:
        """Return once the engine has taken the request. Raises what `next_event` and Engine.add raise."""
        item = await self._next()
        assert item is ADMITTED

    async def next_event(self) -> tuple[int, TokenEvent, float]:
        """The next token event, the choice it is for and when it came, in seconds of time.monotonic.

        Raises EngineError when the engine failed.
        """
        choice, event, came = await self._next()
        return choice, event, came

    def deliver(self, item: Any) -> None:
        """Hand over ADMITTED, an exception, or (choice, event, time). Where too much waits, an error is the last."""
        if self._items.qsize() == self._most_unread:
            message = f"the client reads too slowly: {self._most_unread} tokens are waiting for it"
            item = ApiError(408, message, code="client_too_slow")
            self.close()
        self._items.put_nowait(item)

    def end_choice(self, choice: int) -> None:
        """Stop generating for one choice; events on their way may still arrive."""
        self._abort(self, choice)

    def close(self) -> None:
        """The request is over. Harmless to call again."""
        self._forget(self)

    async def _next(self) -> Any:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item
