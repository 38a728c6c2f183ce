"""Server-sent events on the wire, and what happens to connections that are slow. Numbers are the HTTP contract's."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from cupyllm.api import body, sse
from tests.api.faults import FaultyOps, Turnstile
from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, frames, raw_connection, run_server, wait_until

CHAT = "/v1/chat/completions"


def test_01_04_11_the_wire_format(server: LiveServer) -> None:
    request = {"messages": MESSAGES, "max_tokens": 5, "stream": True}
    response = server.post(CHAT, request)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert frames(response)[-1] == "[DONE]"
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream", "*/*"])
def test_08_09_10_the_body_alone_decides_the_format(server: LiveServer, accept: str) -> None:
    for stream, kind in ((True, "text/event-stream"), (False, "application/json")):
        request = {"messages": MESSAGES, "max_tokens": 1, "stream": stream}
        assert server.post(CHAT, request, headers={"accept": accept}).headers["content-type"].startswith(kind)


def test_02_65_comment_lines_fill_long_pauses(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    ops: list[FaultyOps] = []
    with run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded))) as server:
        with (
            Turnstile(ops[0]),
            server.http.stream(
                "POST", server.url + CHAT, json={"messages": MESSAGES, "max_tokens": 3, "stream": True}
            ) as response,
        ):
            lines = response.iter_lines()
            seen = [next(lines) for _ in range(6)]
        assert seen[0].startswith('data: {"id"')
        assert seen[1:] == ["", ": keep-alive", "", ": keep-alive", ""]
        ops[0].before_step = lambda number: None
        create = server.openai().chat.completions.create
        monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.0001)
        assert len(list(create(model=MODEL_NAME, messages=MESSAGES, max_tokens=3, stream=True))) >= 2


def test_07_a_connection_that_breaks_raises_in_the_official_client(model_folder: Path) -> None:
    """The frame after which the server goes away is not the end of the answer."""
    ops: list[FaultyOps] = []
    with run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded))) as server:
        ops[0].before_step = lambda number: 1 / 0 if number == 4 else None
        stream = server.openai().completions.create(model=MODEL_NAME, prompt="the", max_tokens=50, stream=True)
        with pytest.raises(openai.APIError):
            list(stream)


def test_a_slow_body_is_cut_off_and_blocks_nobody(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with raw_connection(server) as one, raw_connection(server) as other:
        for connection in (one, other):
            connection.sendall(head + b"content-length: 100\r\n\r\n{")
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        for connection in (one, other):
            answer = b"".join(iter(lambda: connection.recv(65536), b""))  # noqa: B023
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"param": null' in answer


def test_a_body_that_breaks_off_is_no_error_of_ours(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with raw_connection(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"x-request-id: breaks-off\r\ncontent-length: 100\r\n\r\n{"
        )
    wait_until(lambda: "breaks-off the client left" in caplog.text, "the server has seen the client leave")
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_a_finished_request_is_one_line_without_text(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    messages = [{"role": "user", "content": "weather-secret"}]
    server.post(CHAT, {"messages": messages, "max_tokens": 3}, headers={"x-request-id": "logged-1"})
    (line,) = [record.message for record in caplog.records if record.message.startswith("logged-1 ")]
    assert " /v1/chat/completions prompt_tokens=" in line
    assert " output_tokens=3 finish=length preemptions=0 queue_s=" in line
    assert "secret" not in caplog.text
