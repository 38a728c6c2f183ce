"""Requests on their way: when they are due (open loop), or when a client is free (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cupyllm.load.client import Client, Outcome


@dataclass(frozen=True)
class Sending:
    """A request that is ready to be sent, in an open loop `arrival_s` seconds after the start."""

    path: str
    body: bytes
    arrival_s: float = 0.0


async def run_load(
    client: Client,
    sendings: Sequence[Sending],
    concurrency: int | None,
    on_outcome: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Send all requests and wait for their answers; the outcomes in the order of the requests.

    With `concurrency` that many are under way at any time, else each is sent when it is due. `on_outcome` is called as
    each ends.
    """

    async def send(sending: Sending, due_at: float) -> Outcome:
        outcome = await client.answer(sending.path, sending.body, due_at)
        on_outcome(outcome)
        return outcome

    start = time.perf_counter()
    if concurrency is None:
        return await _open_loop(send, sendings, start)
    rest = iter(enumerate(sendings))
    outcomes: dict[int, Outcome] = {}

    async def client_loop(rest: Iterator[tuple[int, Sending]]) -> None:
        for number, sending in rest:
            outcomes[number] = await send(sending, time.perf_counter())

    await asyncio.gather(*(client_loop(rest) for _ in range(concurrency)))
    return [outcomes[number] for number in range(len(sendings))]


async def _open_loop(
    send: Callable[[Sending, float], Coroutine[Any, Any, Outcome]], sendings: Sequence[Sending], start: float
) -> list[Outcome]:
    answers = []
    for sending in sendings:
        due_at = start + sending.arrival_s
        await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
        answers.append(asyncio.create_task(send(sending, due_at)))
    return await asyncio.gather(*answers)
