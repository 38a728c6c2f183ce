"""What the event loop holds of a request that is inside the engine. worker.py makes these and feeds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupyllm.engine import Engine, TokenEvent
from cupyllm.errors import RequestError
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence

# What the engine thread delivers first, once it has taken a request.
ADMITTED = object()
# More answers than this to one request are refused; prompts that are given one by one are not limited by it.
MAX_SEQUENCES = 64


@dataclass(frozen=True)
class EngineRequest:
    """What one HTTP request asks of the engine: P prompts and, for each, how to sample its n answers."""

    prompts: list[list[int]]
    params: list[SamplingParams]  # one for each prompt, all with the same n
    priority: int = 0
    cache_salt: str = ""

    @property
    def n(self) -> int:
        return self.params[0].n

    def check(self, engine: Engine) -> None:
        """Refuse what can never be served: raises RequestError naming the field. Any thread may call it."""
        num_sequences = len(self.prompts) * self.n
        most = engine.config.max_waiting
        if self.n > 1:
            most = min(most, MAX_SEQUENCES)
        if num_sequences > most:
            raise RequestError(
                f"{len(self.prompts)} prompts with {self.n} answers each are {num_sequences} sequences; one request "
                f"may have {most} (max_waiting, and {MAX_SEQUENCES} where n or best_of is above 1)",
                param="n" if self.n > 1 else "prompt",
            )
        for prompt, params in zip(self.prompts, self.params, strict=True):
            engine.check(prompt, params)


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
        self.sequences: list[Sequence] = []  # of the engine thread; the place of a sequence is its choice
        self._abort = abort
        self._forget = forget
        self._items: asyncio.Queue[Any] = asyncio.Queue()

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of all prompts were found in the prefix cache; the first answer runs the prompt for all."""
        return sum(sequence.num_cached_tokens or 0 for sequence in self.sequences[:: self.asked.n])

    async def admitted(self) -> None:
        """Return once the engine has taken the request. Raises what `next_event` and Engine.add raise."""
        item = await self._next()
        assert item is ADMITTED

    async def next_event(self) -> tuple[int, TokenEvent]:
        """The next token event and the choice it is for. Raises EngineError when the engine failed."""
        choice, event = await self._next()
        return choice, event

    def deliver(self, item: Any) -> None:
        """Hand over ADMITTED, an exception, or (choice, event)."""
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
