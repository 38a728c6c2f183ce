"""What happens when steps fail or hang, the thread dies, the queue is full, or the client leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cupyllm.sampling import SamplingParams
from cupyllm.startup import LoadedModel
from tests.api.faults import FaultyOps, Turnstile, pass_until, start_stream
from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, frames, raw_connection, run_server, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Faulty = tuple[LiveServer, FaultyOps]
LONG = {"prompt": "the", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def faulty(model_folder: Path) -> Iterator[Faulty]:
    ops: list[FaultyOps] = []
    with run_server(
        model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded)), max_waiting=3, max_decode_batch_size=2
    ) as live:
        yield live, ops[0]


def raise_at(step: int, error: BaseException) -> Any:
    def before_step(number: int) -> None:
        if number == step:
            raise error

    return before_step


def is_idle(server: LiveServer) -> bool:
    stats = server.worker.stats
    return (stats.num_running, stats.num_waiting, stats.num_live_pages, server.worker.num_live) == (0, 0, 0, 0)


def answer(server: LiveServer) -> str:
    response = server.post(TEXT, {"prompt": "the weather", "temperature": 0, "max_tokens": 8})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_a_token_that_nobody_asked_for_fails_a_step_and_does_not_end_the_thread(faulty: Faulty) -> None:
    server, ops = faulty
    expected, engine = answer(server), server.loaded.engine

    def add_another(number: int) -> None:
        ops.before_step = lambda number: None
        engine.add([1, 2, 3], SamplingParams(max_tokens=2))

    ops.before_step = add_another
    response = server.post(TEXT, LONG)
    assert response.status_code == 500, response.text
    wait_until(lambda: is_idle(server), "the engine is idle")
    assert server.worker.trouble() is None
    assert answer(server) == expected


@pytest.mark.parametrize("n", [1, 3])
def test_05_a_failed_step_ends_streams_with_one_error_frame_and_no_done(
    faulty: Faulty, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    server, ops = faulty
    expected = answer(server)
    ops.before_step = raise_at(ops.num_steps + 6, RuntimeError("secret detail of step"))
    events = frames(server.post(TEXT, LONG | {"stream": True, "n": n}, headers={"x-request-id": "fault-1"}))
    assert events[-1]["error"]["type"] == "server_error"
    assert "fault-1" in events[-1]["error"]["message"]
    assert "secret" not in str(events)
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert {event["choices"][0]["index"] for event in events[:-1]} <= set(range(n))
    assert "secret detail of step" in caplog.text
    assert answer(server) == expected
    assert server.get("/health").status_code == 200
    assert is_idle(server)


def test_05_06_the_official_client_raises_on_an_error_frame_with_its_message(faulty: Faulty) -> None:
    server, ops = faulty
    ops.before_step = raise_at(ops.num_steps + 3, MemoryError())
    stream = server.openai().chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.APIError, match="internal error") as caught:
        list(stream)
    assert caught.value.code == "internal_error"


def test_05_a_failed_response_says_so_before_the_error_frame(faulty: Faulty) -> None:
    server, ops = faulty
    ops.before_step = raise_at(ops.num_steps + 6, RuntimeError("secret detail of step"))
    client = server.openai()
    stream = client.responses.create(model=MODEL_NAME, input="the", stream=True, extra_body={"ignore_eos": True})
    events = []
    with pytest.raises(openai.APIError, match="internal error; request id req_"):
        events.extend(stream)
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert "request id req_" in events[-1].response.error.message
    assert events[-1].response.output[0].status == "incomplete"
    assert "secret" not in str(events)
    ops.before_step = raise_at(ops.num_steps + 2, RuntimeError("boom"))
    assert server.post("/v1/responses", {"input": "the"}).status_code == 500
    assert is_idle(server)


def test_a_failed_step_is_500_for_all_plain_requests(faulty: Faulty) -> None:
    server, ops = faulty
    before = server.worker.num_failed_steps
    with Turnstile(ops) as turnstile, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(server.post, TEXT, LONG) for _ in range(2)]
        pass_until(turnstile, lambda: server.worker.stats.num_running == 2)
        ops.before_step = raise_at(ops.num_steps + 1, RuntimeError("boom"))
        turnstile.let_pass(1)
        errors = [future.result() for future in futures]
    for response in errors:
        assert response.status_code == 500
        assert response.json()["error"]["message"].startswith("internal error; request id req_")
    assert server.worker.num_failed_steps == before + 1
    assert answer(server)


def test_a_row_without_finite_logits_ends_only_its_own_request(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    server, ops = faulty
    expected = answer(server)
    real = ops._ops.logits

    def nan_for_one_row(*arguments: Any, **options: Any) -> Any:
        logits = real(*arguments, **options)
        if logits.shape[0] == 2:
            logits[0] = float("nan")
        return logits

    with Turnstile(ops) as turnstile, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, TEXT, LONG)
        pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
        second = pool.submit(answer, server)
        monkeypatch.setattr(ops._ops, "logits", nan_for_one_row)
        pass_until(turnstile, lambda: first.done() and second.done())
    assert first.result().status_code == 500
    assert second.result() == expected
    assert is_idle(server)


def test_a_choice_without_finite_logits_ends_all_choices_of_its_request(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ops = faulty
    real = ops._ops.logits

    def nan_for_one_row(*arguments: Any, **options: Any) -> Any:
        logits = real(*arguments, **options)
        logits[1:] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(ops._ops, "logits", nan_for_one_row)
        events = frames(server.post(TEXT, LONG | {"n": 2, "stream": True}))
        assert [choice["index"] for event in events[:-1] for choice in event["choices"]].count(1) <= 1
        assert "error" in events[-1]
        assert server.post(TEXT, LONG | {"n": 2}).status_code == 500
    wait_until(lambda: is_idle(server), "the other choice has left the engine")
    assert answer(server)


def test_health_is_503_while_every_step_fails_and_recovers(faulty: Faulty) -> None:
    server, ops = faulty

    def fail(number: int) -> None:
        raise RuntimeError("broken device")

    ops.before_step = fail
    assert [server.post(TEXT, LONG).status_code for _ in range(3)] == [500] * 3
    assert server.get("/health").status_code == server.get("/ready").status_code == 503
    ops.before_step = lambda number: None
    assert answer(server)
    assert server.get("/health").status_code == server.get("/ready").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_retry_after(faulty: Faulty, stream: bool) -> None:
    server, ops = faulty
    with ThreadPoolExecutor(8) as pool:
        with Turnstile(ops) as turnstile:
            running = []
            for _ in range(2):
                running.append(start_stream(server, turnstile, pool, LONG))
                pass_until(turnstile, lambda: server.worker.stats.num_waiting == 0)
            waiting = [start_stream(server, turnstile, pool, LONG) for _ in range(3)]
            assert server.worker.stats.num_waiting == 3
            assert server.get("/ready").status_code == 503
            assert server.get("/health").status_code == 200
            turnstile.shut()
            refused = server.post(TEXT, LONG | {"stream": stream})  # while a step is running
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert server.worker.stats.num_running == 2
            for response in running + waiting:
                response.close()
        wait_until(lambda: is_idle(server), "every closed request has left the engine")
    assert answer(server)


def test_who_has_left_the_queue_keeps_nobody_out(faulty: Faulty) -> None:
    """The engine learns only after the step in progress that one of those waiting has gone."""
    server, ops = faulty
    with ThreadPoolExecutor(8) as pool:
        with Turnstile(ops) as turnstile:
            opened = [start_stream(server, turnstile, pool, LONG) for _ in range(2)]
            pass_until(turnstile, lambda: server.worker.stats.num_running == 2)
            opened += [start_stream(server, turnstile, pool, LONG) for _ in range(3)]
            turnstile.shut()
            opened.pop().close()
            wait_until(lambda: server.worker.num_live == 4, "the server has seen that it has gone")
            assert server.worker.stats.num_waiting == 3
            opened.append(start_stream(server, turnstile, pool, LONG))
            assert server.post(TEXT, LONG).status_code == 429
            for response in opened:
                response.close()
        wait_until(lambda: is_idle(server), "every closed request has left the engine")


def test_59_the_official_client_tries_again_after_429(faulty: Faulty) -> None:
    server, ops = faulty
    with ThreadPoolExecutor(8) as pool, Turnstile(ops) as turnstile:
        running = []
        for _ in range(2):
            running.append(start_stream(server, turnstile, pool, LONG))
            pass_until(turnstile, lambda: server.worker.stats.num_waiting == 0)
        running += [start_stream(server, turnstile, pool, LONG) for _ in range(3)]
        statuses: list[int] = []
        hooked = httpx.Client(event_hooks={"response": [lambda response: statuses.append(response.status_code)]})
        client = server.openai(max_retries=2, http_client=hooked)
        create = client.completions.create
        future = pool.submit(create, model=MODEL_NAME, prompt="the", max_tokens=2)
        pass_until(turnstile, lambda: statuses == [429])
        for response in running:
            response.close()
        pass_until(turnstile, future.done)
        assert statuses == [429, 200]
        assert future.result().choices
        hooked.close()


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"n": 2}, {"best_of": 2}])
def test_many_prompts_or_answers_are_taken_all_or_none(faulty: Faulty, fields: dict[str, Any]) -> None:
    server, ops = faulty
    with ThreadPoolExecutor(8) as pool, Turnstile(ops) as turnstile:
        opened = [start_stream(server, turnstile, pool, LONG) for _ in range(2)]
        pass_until(turnstile, lambda: server.worker.stats.num_running == 2)
        opened.append(start_stream(server, turnstile, pool, LONG | {"prompt": ["a", "b"]}))
        refused = pool.submit(server.post, TEXT, LONG | fields)
        pass_until(turnstile, refused.done)
        assert refused.result().status_code == 429
        assert server.worker.stats.num_waiting == 2
        for response in opened:
            response.close()


def test_a_choice_ended_by_a_stop_string_leaves_the_engine_before_the_others(faulty: Faulty) -> None:
    server, ops = faulty
    first, _ = server.post(TEXT, LONG | {"prompt": ["the", "a"], "max_tokens": 20}).json()["choices"]
    with ThreadPoolExecutor(1) as pool, Turnstile(ops) as turnstile:
        body = LONG | {"prompt": ["the", "a"], "stop": [first["text"][3:7]]}
        future = pool.submit(server.post, TEXT, body)
        pass_until(turnstile, lambda: server.worker.stats.num_running == 2)
        steps = ops.num_steps
        pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
        assert ops.num_steps - steps < 100
        assert not future.done()


def test_more_answers_than_may_wait_are_refused_for_good(faulty: Faulty) -> None:
    server, _ = faulty
    for field in ("n", "best_of"):
        response = server.post(TEXT, LONG | {field: 4})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        assert "4 sequences; one request may have 3 (max_waiting" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_when_the_client_leaves_its_pages_are_free_within_two_steps(
    faulty: Faulty, path: str, stream: bool, n: int
) -> None:
    server, ops = faulty
    body = {"max_tokens": 400, "ignore_eos": True, "stream": stream, "n": n}
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
    with Turnstile(ops) as turnstile:
        request = httpx.Request("POST", server.url + path, json=body, headers={"host": "localhost"})
        with raw_connection(server) as connection:
            head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
            pass_until(turnstile, lambda: server.worker.stats.num_running == min(n, 2))
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: server.worker.num_live == 0, "the server has seen the client leave")
        steps = ops.num_steps
    wait_until(lambda: is_idle(server), "the pages are free")
    assert ops.num_steps - steps <= 2, "it would run 400 steps if nobody told the engine"


def test_a_client_that_leaves_while_it_waits_is_forgotten(faulty: Faulty) -> None:
    server, ops = faulty
    with ThreadPoolExecutor(8) as pool, Turnstile(ops) as turnstile:
        first = start_stream(server, turnstile, pool, LONG)
        second = start_stream(server, turnstile, pool, LONG | {"prompt": ["a", "b", "c"]})
        second.close()
        wait_until(lambda: server.worker.num_live == 1, "the server has seen the client leave")
        pass_until(turnstile, lambda: server.worker.stats.num_running == 1 and server.worker.stats.num_waiting == 0)
        first.close()


def test_many_leave_at_random_points_and_nothing_stays(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    server, _ = faulty
    expected = answer(server)
    loop = server.worker._loop
    tasks_before = len(asyncio.all_tasks(loop))

    def leave(number: int) -> None:
        body = LONG | {"stream": number % 2 == 0}
        try:
            with server.http.stream("POST", server.url + TEXT, json=body, timeout=0.02 + number % 7 / 100) as response:
                for received, _ in enumerate(response.iter_bytes()):
                    if received == number % 5:
                        return
        except httpx.TimeoutException:
            return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(60)))
    wait_until(lambda: is_idle(server), "every request has left the engine")
    wait_until(lambda: len(asyncio.all_tasks(loop)) <= tasks_before, "every task on the event loop has ended")
    gc.collect()
    assert "destroyed" not in caplog.text, "asyncio found a task that nobody ended"
    assert answer(server) == expected


def test_a_hung_step_turns_health_to_503_refuses_requests_and_recovers(model_folder: Path) -> None:
    ops: list[FaultyOps] = []
    with (
        run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded)), watchdog_seconds=0.3) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        expected = answer(server)
        release = threading.Event()
        ops[0].before_step = lambda number: release.wait(60) and None
        try:
            plain = pool.submit(server.post, TEXT, LONG)
            wait_until(lambda: server.get("/health").status_code == 503, "/health tells of the hung step")
            assert server.get("/ready").status_code == 503
            refused = server.post(TEXT, LONG)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert plain.result(20).status_code == 500
        finally:
            release.set()
        wait_until(lambda: server.get("/health").status_code == 200, "/health recovers")
        assert answer(server) == expected
        wait_until(lambda: is_idle(server), "the abandoned request has left the engine")


def test_a_dead_engine_thread_turns_health_to_503(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ops: list[FaultyOps] = []
    with run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded))) as server:
        ops[0].before_step = raise_at(ops[0].num_steps + 3, SystemExit("killed"))
        events = frames(server.post(TEXT, LONG | {"stream": True}))
        assert events[-1]["error"]["type"] == "server_error"
        wait_until(lambda: server.get("/health").status_code == 503, "/health tells of the death")
        assert "the engine thread has ended" in server.get("/health").json()["error"]["message"]
        assert server.post(TEXT, LONG).status_code == 503
        assert "the engine thread died" in caplog.text


def test_health_answers_while_a_prompt_is_tokenised(model_folder: Path) -> None:
    release = threading.Event()

    def wait_in_tokenizer(loaded: LoadedModel) -> None:
        real = loaded.tokenizer.encode
        loaded.tokenizer.encode = lambda text, **options: release.wait(60) and real(text, **options)  # type: ignore

    with run_server(model_folder, prepare=wait_in_tokenizer) as server, ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(server.post, TEXT, {"prompt": "a", "max_tokens": 1}) for _ in range(8)]
        try:
            assert [server.get("/health").status_code for _ in range(20)] == [200] * 20
            assert not any(future.done() for future in futures)
        finally:
            release.set()
        assert [future.result().status_code for future in futures] == [200] * 8


@pytest.mark.parametrize("part", ["encode", "token_bytes"])
def test_a_tokenizer_that_fails_hurts_only_its_request(
    model_folder: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_server(model_folder) as server:
        expected = answer(server)

        def fail(*_: Any, **__: Any) -> Any:
            raise ValueError("secret detail")

        with monkeypatch.context() as patch:
            patch.setattr(server.loaded.tokenizer, part, fail)
            response = server.post(TEXT, {"prompt": "a"})
            assert response.status_code == 500
            assert "secret" not in response.text
            if part == "token_bytes":
                assert "error" in frames(server.post(CHAT, {"messages": MESSAGES, "stream": True}))[-1]
        wait_until(lambda: is_idle(server), "the failed requests have left the engine")
        assert answer(server) == expected
