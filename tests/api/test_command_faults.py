"""Faults of ours between two steps: while a request is added, aborted or dropped, and while the page is watched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cupyllm.api.errors import UnavailableError
from tests.api.faults import FaultyOps, Turnstile, pass_until, start_stream
from tests.api.live_server import LiveServer, frames, run_server, wait_until

TEXT = "/v1/completions"
LONG = {"prompt": "the", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one answer": (TEXT, LONG),
    "three answers": (TEXT, LONG | {"n": 3, "temperature": 1}),
    "two prompts": (TEXT, LONG | {"prompt": ["a", "b"]}),
    "prompt logprobs": (TEXT, LONG | {"prompt_logprobs": 1}),
    "a stream": (TEXT, LONG | {"stream": True}),
    "beams": (TEXT, {"prompt": "the", "use_beam_search": True, "beam_width": 2, "n": 2, "max_tokens": 20}),
    "two vectors": ("/v1/embeddings", {"input": ["the weather", "another"]}),
}
Faulty = tuple[LiveServer, FaultyOps]


@pytest.fixture
def faulty(model_folder: Path) -> Iterator[Faulty]:
    ops: list[FaultyOps] = []
    with run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded))) as live:
        yield live, ops[0]


def fail_in_call(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool = False) -> list[int]:
    """Make one call of a method raise, counted from 1, before or after it has done its work; returns the calls."""
    real, calls = getattr(owner, name), list[int]()

    def faulty_method(*arguments: Any, **options: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] != call:
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        raise RuntimeError("secret detail")

    patch.setattr(owner, name, faulty_method)
    return calls


def is_empty(server: LiveServer) -> bool:
    stats, worker = server.worker.stats, server.worker
    return (stats.num_running, stats.num_waiting, stats.num_live_pages, worker.num_live) == (0, 0, 0, 0)


def text_of(server: LiveServer, **fields: Any) -> str:
    response = server.post(TEXT, LONG | fields)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def assert_well(server: LiveServer, expected: str) -> None:
    """Nothing is left of the fault: no sequence, page or permit to wait, and the next answers are right."""
    wait_until(lambda: is_empty(server), "every request has left the engine")
    assert server.get("/health").status_code == server.get("/ready").status_code == 200
    assert text_of(server) == expected
    waiting = server.worker._waiting
    wait_until(lambda: (waiting._coming, waiting._leaving) == (0, 0), "nobody is counted who does not wait")
    server.loaded.engine.check_idle()


@pytest.mark.parametrize(
    ("kind", "part"),
    [*((kind, part) for kind in REQUESTS for part in ("make_sequence", "add")), ("beams", "make_search")],
)
def test_a_request_that_cannot_be_added_fails_alone(
    faulty: Faulty, kind: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ops = faulty
    (path, body), engine = REQUESTS[kind], server.loaded.engine
    expected = text_of(server)
    owner = engine.scheduler if part == "add" else engine.admission
    for call in (1, 2):
        with ThreadPoolExecutor(2) as pool:
            with Turnstile(ops) as turnstile, monkeypatch.context() as patch:
                neighbour = pool.submit(text_of, server)
                pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
                calls = fail_in_call(patch, owner, part, call)
                response = pool.submit(server.post, path, body)
                pass_until(turnstile, response.done)
            was_hit = len(calls) >= call
            assert response.result().status_code == (500 if was_hit else 200)
            if was_hit:
                assert response.result().json()["error"]["message"].startswith("internal error; request id req_")
                assert "secret" not in response.result().text
            assert neighbour.result() == expected
        assert_well(server, expected)


def test_a_request_that_can_neither_be_added_nor_taken_out_is_told_so(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = faulty
    engine, expected = server.loaded.engine, text_of(server)
    with monkeypatch.context() as patch:
        fail_in_call(patch, engine.admission, "make_sequence", 2)
        calls = fail_in_call(patch, engine, "abort", 1)
        assert server.post(TEXT, LONG | {"prompt": ["a", "b"]}).status_code == 500
        assert calls
    assert_well(server, expected)


def leave_stream(server: LiveServer, turnstile: Turnstile, pool: ThreadPoolExecutor) -> None:
    start_stream(server, turnstile, pool, LONG).close()


def stop_one_choice(server: LiveServer, turnstile: Turnstile, pool: ThreadPoolExecutor) -> None:
    pool.submit(
        server.post, TEXT, LONG | {"n": 2, "seed": 1, "temperature": 1, "stop": ["a", "e", "i", "o", "u", " "][:4]}
    )


@pytest.mark.parametrize("end", [leave_stream, stop_one_choice])
@pytest.mark.parametrize(("part", "after"), [("abort", False), ("abort", True), ("remove", False)])
def test_an_abort_that_fails_ends_what_is_live_and_the_engine_goes_on(
    faulty: Faulty,
    end: Callable[[LiveServer, Turnstile, ThreadPoolExecutor], None],
    part: str,
    after: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, ops = faulty
    expected = text_of(server)
    owner = server.loaded.engine if part == "abort" else server.loaded.engine.scheduler
    with ThreadPoolExecutor(4) as pool:
        with Turnstile(ops) as turnstile, monkeypatch.context() as patch:
            neighbour = pool.submit(server.post, TEXT, LONG | {"max_tokens": 400})
            pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
            calls = fail_in_call(patch, owner, part, 1, after=after)
            end(server, turnstile, pool)
            pass_until(turnstile, lambda: len(calls) > 0 and neighbour.done())
        assert neighbour.result().status_code == 500
        assert "internal error; request id req_" in neighbour.result().text
    assert "a command to the engine failed" in caplog.text
    assert_well(server, expected)


def test_an_engine_that_cannot_be_emptied_stops_loudly(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages that nobody holds and nobody can have would otherwise be lost until the next start."""
    server, ops = faulty
    with ThreadPoolExecutor(4) as pool:
        with Turnstile(ops) as turnstile, monkeypatch.context() as patch:
            neighbour = pool.submit(server.post, TEXT, LONG | {"max_tokens": 400})
            pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
            fail_in_call(patch, server.loaded.engine.scheduler.allocator, "release", 1)
            start_stream(server, turnstile, pool, LONG).close()
            pass_until(turnstile, neighbour.done)
        assert neighbour.result().status_code == 500
    assert server.get("/health").status_code == server.get("/ready").status_code == 503
    assert server.post(TEXT, LONG).status_code == 503
    assert "the engine thread died" in caplog.text
    assert server.worker.num_live == 0


def test_nobody_waits_for_a_thread_that_has_died(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread still counts as alive for a moment after it has told everybody that it ended."""
    server, ops = faulty
    worker, arrived, go = server.worker, threading.Event(), threading.Event()

    def die(number: int) -> None:
        arrived.set()
        assert go.wait(20)
        raise SystemExit("killed")

    ops.before_step = die
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(server.post, TEXT, LONG | {"stream": True})
        assert arrived.wait(20)
        call = asyncio.run_coroutine_threadsafe(worker.call(lambda: 1), worker._loop)
        queued = [pool.submit(server.post, TEXT, LONG) for _ in range(2)]
        wait_until(lambda: worker.num_live == 3, "two requests wait for the step to end")
        monkeypatch.setattr(worker._thread, "is_alive", lambda: True)
        go.set()
        with pytest.raises(UnavailableError, match="has ended"):
            call.result(20)
        assert "error" in frames(running.result(20))[-1]
        assert [future.result(20).status_code for future in queued] == [500, 500]
    assert server.post(TEXT, LONG).status_code == 503
    with pytest.raises(UnavailableError, match="has ended"):
        asyncio.run_coroutine_threadsafe(worker.call(lambda: 1), worker._loop).result(20)
    assert server.get("/health").status_code == 503


def test_a_command_that_concerns_no_request_ends_none(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    server, ops = faulty

    def fail() -> None:
        raise RuntimeError("secret detail")

    expected = text_of(server)
    with ThreadPoolExecutor(1) as pool:
        with Turnstile(ops) as turnstile:
            future = pool.submit(text_of, server)
            pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
            server.worker.post(fail)
            pass_until(turnstile, lambda: "a command that concerns no request failed" in caplog.text)
        assert future.result() == expected
    assert_well(server, expected)


def test_a_page_whose_trace_fails_hurts_no_request(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = faulty
    expected = text_of(server)
    with monkeypatch.context() as patch:
        fail_in_call(patch, server.worker.trace, "listen", 1)
        with server.http.stream("GET", f"{server.url}/live/steps") as response:
            assert '"error"' in "".join(response.iter_text()), "its stream ends with an error"
    assert_well(server, expected)
