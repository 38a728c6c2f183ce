"""Limits at, below and above (those of bodies, nesting, messages and prompts are in test_bad_bodies.py)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from tests.api.live_server import MESSAGES, LiveServer, raw_connection

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def status_and_message(server: LiveServer, path: str, fields: dict[str, Any]) -> tuple[int, str]:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    answer = server.post(path, base | {"max_tokens": 1} | fields)
    assert answer.status_code in (200, 400), answer.text
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]


def sized(name: str, count: int) -> dict[str, Any]:
    """A request in which a field has so many entries, or that number."""
    values: dict[str, Any] = {
        "stop": ["x"] * count,
        "stop_token_ids": [5] * count,
        "bad_words": ["x"] * count,
        "tools": [{"type": "function", "function": {"name": f"f{number}"}} for number in range(count)],
        "cache_salt": "x" * count,
    }
    beside = {"top_logprobs": {"logprobs": True}, "tools": {"tool_choice": "none"}}
    return {name: values.get(name, count)} | beside.get(name, {})


@pytest.mark.parametrize(
    ("path", "name", "limit"),
    [
        *((path, "n", 16) for path in (CHAT, TEXT)),
        *((path, "stop", 4) for path in (CHAT, TEXT)),
        *((path, "stop_token_ids", 128) for path in (CHAT, TEXT)),
        *((path, "bad_words", 128) for path in (CHAT, TEXT)),
        *((path, "cache_salt", 256) for path in (CHAT, TEXT)),
        *((path, "prompt_logprobs", 20) for path in (CHAT, TEXT)),
        (CHAT, "top_logprobs", 20),
        (TEXT, "logprobs", 20),
        (TEXT, "best_of", 16),
        (CHAT, "tools", 128),
    ],
)
def test_21_a_field_at_below_and_above_its_limit(server: LiveServer, path: str, name: str, limit: int) -> None:
    for count, expected in ((limit - 1, 200), (limit, 200), (limit + 1, 400)):
        status, message = status_and_message(server, path, sized(name, count))
        assert status == expected, (count, message)
    assert str(limit) in message


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_21_as_many_biases_as_may_be(server: LiveServer, path: str) -> None:
    """The small model has fewer tokens than that: at the limit it is their ids that are refused."""
    for count, words in ((1024, "token ids go from 0"), (1025, "at most 1024")):
        status, message = status_and_message(server, path, {"logit_bias": {str(i): 1 for i in range(count)}})
        assert status == 400
        assert words in message


@pytest.mark.parametrize(("size", "status"), [(1_000, b"200"), (60_000, b"200"), (66_000, b"400")])
def test_21_the_limit_of_a_head(server: LiveServer, size: int, status: bytes) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-long: "
    with raw_connection(server) as client:
        client.sendall(head + b"x" * (size - len(head) - 4) + b"\r\n\r\n")
        assert client.recv(65536).split()[1] == status


def test_21_two_hundred_unfinished_requests_hold_up_nobody(server: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with ExitStack() as stack:
        for number in range(200):
            client = stack.enter_context(raw_connection(server))
            client.sendall(head[: 40 + number // 4] if number % 2 else head + b"content-length: 100\r\n\r\n{")
        for _ in range(3):
            assert server.get("/health").status_code == 200
            assert status_and_message(server, TEXT, {})[0] == 200
