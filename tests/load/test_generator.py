"""When requests are sent: at their times in the open loop, one after an answer in the closed loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from cupyllm.load.client import Client, Outcome
from cupyllm.load.generator import Sending, run_load


class ScriptedClient:
    """Answers as `script` says; keeps what it was asked for, in order."""

    def __init__(self, script: Callable[[int], Awaitable[None]]) -> None:
        self.script = script
        self.due: list[float] = []
        self.live = self.most_live = 0

    async def answer(self, path: str, body: bytes, due_at: float) -> Outcome:
        number = len(self.due)
        self.due.append(due_at)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        sent_at = time.perf_counter()
        await self.script(number)
        self.live -= 1
        return Outcome(due_at, sent_at, time.perf_counter(), [time.perf_counter()], output_tokens=int(body))


def sendings(*arrivals: float) -> list[Sending]:
    return [Sending("/", b"%d" % number, arrival) for number, arrival in enumerate(arrivals)]


def load(client: ScriptedClient, requests: list[Sending], concurrency: int | None, **options: Any) -> list[Outcome]:
    return asyncio.run(run_load(cast(Client, client), requests, concurrency, **options))


def test_the_open_loop_sends_whether_or_not_others_have_been_answered() -> None:
    """No answer comes before the last request has been sent: a loop that waits for one would never end."""
    all_sent = asyncio.Event()

    async def answer(number: int) -> None:
        if number == 4:
            all_sent.set()
        await asyncio.wait_for(all_sent.wait(), 20)

    client = ScriptedClient(answer)
    assert len(load(client, sendings(0.0, 0.001, 0.002, 0.003, 0.004), None)) == 5
    assert client.most_live == 5


def test_the_open_loop_keeps_its_schedule_when_the_client_is_held_up() -> None:
    """The first answer holds up the whole client for longer than the schedule lasts, and every later request's time
    counts from when it was due all the same."""
    arrivals = (0.0, 0.01, 0.02, 0.03)

    async def answer(number: int) -> None:
        if number == 0:
            time.sleep(0.1)

    client = ScriptedClient(answer)
    outcomes = load(client, sendings(*arrivals), None)
    start = client.due[0]
    assert [due - start for due in client.due] == pytest.approx(arrivals, abs=1e-9)
    for outcome, arrival in zip(outcomes[1:], arrivals[1:], strict=True):
        assert outcome.sent_at - outcome.due_at >= 0.1 - arrival - 1e-6
        assert outcome.time_to_first_token >= 0.1 - arrival - 1e-6


def test_nothing_is_sent_before_it_is_due() -> None:
    async def answer(number: int) -> None:
        pass

    for outcome in load(ScriptedClient(answer), sendings(0.0, 0.02, 0.05), None):
        assert outcome.sent_at >= outcome.due_at


@pytest.mark.parametrize(("concurrency", "live"), [(1, 1), (3, 3), (50, 7)])
def test_the_closed_loop_keeps_so_many_under_way(concurrency: int, live: int) -> None:
    async def answer(number: int) -> None:
        await asyncio.sleep(0)

    client = ScriptedClient(answer)
    load(client, sendings(*[0.0] * 7), concurrency)
    assert client.most_live == live


def test_a_closed_client_sends_its_next_when_its_last_is_answered() -> None:
    """The first answer is held back until all others are there: the second client must have sent all of them."""
    others = asyncio.Event()

    async def answer(number: int) -> None:
        if number == 0:
            await asyncio.wait_for(others.wait(), 20)
        elif number == 5:
            others.set()

    assert len(load(ScriptedClient(answer), sendings(*[0.0] * 6), 2)) == 6


@pytest.mark.parametrize("concurrency", [None, 2])
def test_outcomes_are_in_the_order_of_the_requests(concurrency: int | None) -> None:
    async def answer(number: int) -> None:
        await asyncio.sleep(0.01 * (5 - number))

    seen: list[Outcome] = []
    outcomes = load(ScriptedClient(answer), sendings(*[0.0] * 5), concurrency, on_outcome=seen.append)
    assert [outcome.output_tokens for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert sorted(map(id, seen)) == sorted(map(id, outcomes))
