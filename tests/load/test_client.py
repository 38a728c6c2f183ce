"""The client against a real server, and against raw ones that fail in every way a server can."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cupyllm.errors import ConfigError
from cupyllm.load.client import Client, Outcome
from cupyllm.load.connection import Target
from cupyllm.load.options import Load, add_load_options, measure, read_goal, read_load
from cupyllm.load.statistics import Goal, summarise
from tests.api.live_server import MODEL_NAME, LiveServer, run_server, write_model_folder

EVENT = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
LAST = b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with run_server(write_model_folder(tmp_path_factory.mktemp("model")), device="reference", max_waiting=64) as live:
        yield live


def load(*words: str) -> Load:
    parser = argparse.ArgumentParser()
    add_load_options(parser)
    return read_load(parser.parse_args(words))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("arrivals", [("--concurrency", "3"), ("--poisson", "200")])
def test_a_load_on_a_real_server(server: LiveServer, endpoint: str, arrivals: tuple[str, str]) -> None:
    words = ("--requests", "8", "--prompt-tokens", "9", "--output-tokens", "5", "--endpoint", endpoint)
    outcomes = measure(f"{server.url}/v1", load(*arrivals, *words))
    assert [outcome.error for outcome in outcomes] == [None] * 8
    assert {outcome.output_tokens for outcome in outcomes} == {5}
    for outcome in outcomes:
        assert outcome.prompt_tokens is not None
        assert outcome.prompt_tokens >= 9
        assert outcome.text_times == sorted(outcome.text_times)
        assert outcome.due_at <= outcome.sent_at <= outcome.text_times[0]
        assert outcome.text_times[-1] <= outcome.ended_at
    summary = summarise(outcomes, Goal(end_to_end=1e6))
    assert summary.output_tokens == 40
    assert summary.goodput == summary.requests_per_s


def test_a_refusal_is_an_outcome_with_the_servers_reason(server: LiveServer) -> None:
    options = ("--concurrency", "2", "--requests", "2", "--prompt-tokens", "4", "--output-tokens", "4")
    outcomes = measure(server.url, load(*options, "--extra", '{"top_k": "many"}'))
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error.startswith("status 400: ")
        assert "top_k" in outcome.error
    assert measure(server.url, load(*options, "--model", MODEL_NAME))[0].error is None
    assert str(measure(server.url, load(*options, "--model", "other"))[0].error).startswith("status 404: ")


def test_more_fields_reach_the_server(server: LiveServer) -> None:
    options = ("--concurrency", "1", "--requests", "1", "--prompt-tokens", "4", "--output-tokens", "200")
    (letter,) = server.loaded.tokenizer.encode("a")
    extra = json.dumps({"ignore_eos": None, "allowed_token_ids": [letter]})
    assert measure(server.url, load(*options, "--extra", extra))[0].output_tokens == 200


def answers(handler: Handler, requests: int = 1, timeout: float = 20.0) -> list[Outcome]:
    """Send requests one after the other with one client to a server that treats every connection with `handler`."""

    async def run() -> list[Outcome]:
        listener = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with listener:
            client = Client(Target("127.0.0.1", listener.sockets[0].getsockname()[1]), timeout=timeout)
            outcomes = [await client.answer("/v1/chat/completions", b"{}", 0.0) for _ in range(requests)]
            await client.close()
            return outcomes

    return asyncio.run(run())


async def read_request(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n{}")


def responding(*pieces: bytes, status: str = "200 OK", headers: str = "") -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(f"HTTP/1.1 {status}\r\n{headers}connection: close\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    return handle


def test_an_answer_that_is_complete() -> None:
    (outcome,) = answers(responding(EVENT, EVENT, LAST))
    assert outcome.error is None
    assert outcome.output_tokens is None  # nobody counted
    assert outcome.num_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([EVENT, EVENT], "the stream ended before the answer did"),
        ([LAST], "an answer without text"),
        (
            [EVENT, b'data: {"error": {"message": "out of pages"}}\n\n', b"data: [DONE]\n\n"],
            "error event: out of pages",
        ),
        ([EVENT, b"data: x\n\n"], "error event: an event that is not a JSON object"),
    ],
)
def test_a_stream_that_breaks_off_or_says_so_is_an_error(pieces: list[bytes], error: str) -> None:
    assert answers(responding(*pieces))[0].error == error


def test_a_body_that_ends_too_early_is_an_error() -> None:
    (outcome,) = answers(responding(EVENT, LAST, headers="content-length: 1000\r\n"))
    assert outcome.error is not None
    assert outcome.error.startswith("connection: ")


def test_a_status_is_told_with_its_message() -> None:
    busy = responding(b'{"error": {"message": "full"}}', status="429 Too Many Requests")
    assert answers(busy)[0].error == "status 429: full"
    assert answers(responding(b"<html>", status="502 Bad Gateway"))[0].error == "status 502: <html>"


def test_what_is_no_http_is_an_error() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0\r\n\r\n")
        writer.close()

    assert str(answers(handle)[0].error).startswith("connection: ")


def test_a_server_that_never_answers_runs_into_the_timeout() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    assert answers(handle, timeout=0.2)[0].error == "no answer within 0.2 s"


def test_connections_are_kept_and_one_that_was_closed_meanwhile_is_replaced() -> None:
    """The server ends each connection without a word after two answers: no request may fail of that."""
    seen: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(0)
        for _ in range(2):
            await read_request(reader)
            content = EVENT + LAST
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content))
            seen[-1] += 1
        await writer.drain()
        writer.close()

    assert [outcome.error for outcome in answers(handle, requests=5)] == [None] * 5
    assert seen == [2, 2, 1]


def test_a_server_that_is_not_there() -> None:
    async def run() -> Outcome:
        listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        await listener.wait_closed()
        return await Client(Target("127.0.0.1", port)).answer("/", b"{}", 0.0)

    outcome = asyncio.run(run())
    assert outcome.error is not None
    assert outcome.error.startswith("connection: ")
    options = load("--concurrency", "1", "--requests", "1")
    with pytest.raises(ConfigError, match=r"GET /v1/models of 127\.0\.0\.1:9 failed: "):
        measure("http://127.0.0.1:9", options)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://localhost/v1", Target("localhost", 80)),
        ("https://example.com/proxy/v1/", Target("example.com", 443, tls=True, path="/proxy")),
    ],
)
def test_urls_with_and_without_v1(url: str, target: Target) -> None:
    assert Target.parse(url) == target


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:99999", "http://host/?a=1"])
def test_a_url_that_cannot_be_used_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="the URL"):
        Target.parse(url)


def test_goals_are_milliseconds_by_name() -> None:
    assert read_goal("ttft=500,tpot=50,e2e=2000") == Goal(0.5, 0.05, 2.0)
    assert read_goal(None) is None
    for text in ("", "ttft", "ttft=", "ttft=0", "ttft=nan", "ttft=inf", "latency=5"):
        with pytest.raises(ConfigError, match="--goal"):
            read_goal(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--extra", "{"), "--extra is not JSON"),
        (("--extra", "[1]"), "expected a JSON object"),
        (("--warm-up", "-1"), "--warm-up is '-1'"),
        (("--timeout", "0"), "--timeout is '0'"),
        (("--api-key-env", "NOT_SET_IN_TESTS"), "NOT_SET_IN_TESTS is not set"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(words: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("--concurrency", "1", *words)


def test_a_key_is_sent_where_the_server_wants_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THIS_TEST", "secret")
    options: Any = ("--concurrency", "1", "--requests", "1", "--prompt-tokens", "4", "--output-tokens", "2")
    with run_server(write_model_folder(tmp_path), device="reference", api_key_env="KEY_OF_THIS_TEST") as live:
        assert measure(live.url, load(*options, "--api-key-env", "KEY_OF_THIS_TEST"))[0].error is None
        with pytest.raises(ConfigError, match="status 401"):
            measure(live.url, load(*options))
