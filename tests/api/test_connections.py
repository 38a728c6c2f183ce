"""HTTP below the application: requests that cannot be read, heads that never end, Expect, HEAD, kept connections."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cupyllm.api import connection, live_request
from tests.api.faults import FaultyOps, Turnstile, start_stream
from tests.api.live_server import LiveServer, frames, raw_connection, run_server, wait_until

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
JSON = b"content-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def read_answer(client: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one answer on a connection that stays open."""
    head, _, body = client.recv(65536).partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += client.recv(65536)
    return head, body


UNREADABLE = {
    "no request": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a path that is not ASCII": "GET /ü HTTP/1.1\r\nhost: localhost\r\n\r\n".encode(),
    "a header without a name": GET + b": x\r\n\r\n",
    "two lengths": POST + JSON + b"content-length: 4\r\ncontent-length: 5\r\n\r\n12345",
    "a length below 0": POST + JSON + b"content-length: -4\r\n\r\n12345",
    "a chunk without a size": POST + JSON + CHUNKED + b"ZZ\r\n",
    "a head that is too long": GET + b"x-long: " + b"x" * 70_000,
}


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_57_64_what_is_not_http_is_refused_with_the_error_object(
    server: LiveServer, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with raw_connection(server) as client:
        client.sendall(sent)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    lines = [line.lower() for line in head.split(b"\r\n")]
    assert lines[0] == b"http/1.1 400 bad request"
    assert b"content-type: application/json" in lines
    (request_id,) = [line[14:].decode() for line in lines if line.startswith(b"x-request-id: ")]
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, None)
    assert f"{request_id} refused with 400" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_what_cannot_be_read_after_an_answer_closes_the_connection(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_connection(server) as client:
        client.sendall(POST + CHUNKED + b"1\r\na\r\n")
        assert read_answer(client)[0].startswith(b"HTTP/1.1 415")
        client.sendall(b"ZZ\r\n")
        assert read_all(client) == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "sent", [b"", GET, POST + CHUNKED + b"1\r\na\r\n"], ids=["nothing", "half a head", "a body that is refused already"]
)
def test_a_client_that_does_not_come_to_an_end_is_cut_off(
    server: LiveServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    with raw_connection(server) as client:
        client.sendall(sent)
        if sent.startswith(b"POST"):
            read_answer(client)
            client.sendall(b"1\r\na\r\n")
        assert read_all(client) == b""


def test_nobody_else_is_cut_off(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a stream that takes its time, and not a connection that is kept for the next request."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    ops: list[FaultyOps] = []
    with (
        run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded))) as server,
        ThreadPoolExecutor(1) as pool,
        raw_connection(server) as kept,
    ):
        kept.sendall(GET + b"\r\n")
        assert read_answer(kept)[1] == b'{"status": "ok"}'
        with Turnstile(ops[0]) as turnstile:
            stream = start_stream(server, turnstile, pool, {"prompt": "a", "max_tokens": 9})
            with raw_connection(server) as idle:
                assert read_all(idle) == b""  # now the time is over for the others too
        stream.read()
        assert frames(stream)[-1] == "[DONE]"
        kept.sendall(GET + b"\r\n")
        assert read_answer(kept)[1] == b'{"status": "ok"}'


STUCK = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 16, "temperature": 1, "seed": 1}


@contextmanager
def narrow_connection(server: LiveServer) -> Iterator[socket.socket]:
    """Its receive buffer is the smallest that there is, so that the server's side is soon full."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.settimeout(20)
        client.connect(("127.0.0.1", server.port))
        yield client


def send_json(client: socket.socket, body: Any) -> None:
    content = json.dumps(body).encode()
    client.sendall(POST + JSON + b"content-length: %d\r\n\r\n" % len(content) + content)


def test_a_client_that_does_not_read_is_cut_off_and_its_request_ends(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.2)
    with narrow_connection(server) as client:
        send_json(client, STUCK)
        wait_until(lambda: "has read nothing for 0.2 s" in caplog.text, "the client is given up")
        wait_until(lambda: server.worker.num_live == 0, "its request has ended")
        with suppress(ConnectionResetError):
            assert not read_all(client).endswith(b"0\r\n\r\n"), "the answer came to its end"


def test_a_client_that_reads_slowly_gets_everything_and_holds_nobody_up(server: LiveServer) -> None:
    with narrow_connection(server) as client:
        send_json(client, STUCK)
        received = client.recv(65536)
        wait_until(lambda: server.worker.stats.num_running == 0, "the engine is done with what it does not read")
        assert server.post("/v1/completions", {"prompt": "b", "max_tokens": 1}).status_code == 200
        while data := client.recv(65536):
            received += data
            if received.endswith(b"0\r\n\r\n"):
                break
    assert b"data: [DONE]" in received
    assert received.count(b'"finish_reason": "length"') == 16


def test_a_client_that_falls_too_far_behind_gets_an_error_frame(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_request, "MAX_UNREAD", 10)
    with narrow_connection(server) as client:
        send_json(client, STUCK)
        wait_until(lambda: server.worker.num_live == 1, "the request has begun")
        wait_until(lambda: server.worker.num_live == 0, "the request has ended")
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += client.recv(65536)
    last = received.split(b"\n\n")[-2].partition(b"data: ")[2]
    assert json.loads(last)["error"]["code"] == "client_too_slow"
    assert b"160 tokens are waiting" in last
    wait_until(lambda: server.worker.stats.num_running == 0, "the engine has dropped it")


def test_expect_100_continue_is_answered_before_the_body_is_sent(server: LiveServer) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = POST + JSON + b"connection: close\r\nexpect: 100-continue\r\n"
    with raw_connection(server) as client:
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert read_all(client).startswith(b"HTTP/1.1 200 ")
    with raw_connection(server) as client:
        client.sendall(head + b"content-length: 99999999999\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 413 "), "nobody asked it to send that"


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models", "/v1/models/tiny", "/v1/models/nope"])
def test_head_is_get_without_a_body(server: LiveServer, path: str) -> None:
    get, head = server.get(path), server.http.head(server.url + path)
    assert head.content == b""
    assert head.status_code == get.status_code
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]


def test_log_lines_and_messages_stay_short(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for method, path in (("GET", "/" + "a" * 50_000), ("X" * 50_000, "/health"), ("GET", "/%0aFAKE")):
        response = server.http.request(method, server.url + path)
        assert response.status_code in (404, 405)
        assert len(response.text) < 500
    refused = [record.message for record in caplog.records if "refused with" in record.message]
    assert len(refused) == 3
    assert all(len(line) < 300 and "\n" not in line for line in refused)
