"""A real server on a free port of 127.0.0.1, in a thread of the test process, over a small random model."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from cupyllm.api.app import make_app
from cupyllm.api.openapi import document
from cupyllm.api.serve import bind_socket, uvicorn_options
from cupyllm.api.worker import EngineWorker
from cupyllm.config import ServerConfig
from cupyllm.startup import LoadedModel, load_engine
from tests.api.described import Description
from tests.qwen_tokenizer import QWEN3_TEMPLATE, QWEN3_TOKENS, tokenizer_json, write_tokenizer_folder
from tests.tiny_checkpoint import write_tiny_checkpoint

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 512
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris today?"}]


@dataclass(frozen=True)
class LiveServer:
    port: int
    loaded: LoadedModel
    worker: EngineWorker
    routes: tuple[tuple[str, str], ...]  # (method, path) of every registered route
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, **options: Any) -> openai.OpenAI:
        settings = {"api_key": "none", "base_url": f"{self.url}/v1", "max_retries": 0, "http_client": self.http}
        return openai.OpenAI(**(settings | options))

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(f"{self.url}{path}", json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(f"{self.url}{path}", **options)

    def status(self, method: str, path: str, headers: dict[str, Any] | None = None) -> int:
        """Of an answer that is not read: /live/steps has no end."""
        with self.http.stream(method, f"{self.url}{path}", headers=headers) as response:
            return response.status_code


def write_model_folder(folder: Path, template: str = QWEN3_TEMPLATE) -> Path:
    """Random weights under a small tokenizer of Qwen3's kind."""
    ids = {token["content"]: token["id"] for token in tokenizer_json(QWEN3_TOKENS)["added_tokens"]}
    vocab_size = max(ids.values()) + 1
    end = ids["<|im_end|>"]
    write_tiny_checkpoint(
        folder, vocab_size=vocab_size, eos_token_id=end, generation_config={"eos_token_id": [end, end - 2]}
    )
    return write_tokenizer_folder(folder, added=QWEN3_TOKENS, template=template)


@contextmanager
def run_server(
    folder: Path, *, prepare: Callable[[LoadedModel], None] = lambda loaded: None, **settings: Any
) -> Iterator[LiveServer]:
    """A server with small limits; `prepare` may change the loaded model first, to inject faults."""
    defaults = {"served_model_name": MODEL_NAME, "max_model_len": MAX_MODEL_LEN, "kv_cache_gib": 0.02, "port": 0}
    defaults["api_key_env"] = "NOT_SET_IN_TESTS"  # whoever runs the tests may have set the usual one
    config = ServerConfig(model=str(folder), **(defaults | settings))
    loaded = load_engine(config, show_progress=False)
    prepare(loaded)
    app = make_app(loaded, config)
    listener = bind_socket(config.host, config.port)
    server = uvicorn.Server(uvicorn_options(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started, "the server listens")
        routes = tuple((method, route.path) for route in app.routes for method in sorted(route.methods))
        description = Description(document(app.routes, needs_key=False, strict=config.strict_parameters))
        with httpx.Client(timeout=30, event_hooks={"response": [description.check]}) as http:
            yield LiveServer(listener.getsockname()[1], loaded, app.state.server.worker, routes, http)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not stop"


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Look again and again until `holds`; a test that waits longer than the deadline fails."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain until {what}"
        time.sleep(0.005)


def frames(response: httpx.Response) -> list[Any]:
    """The events of a finished stream: JSON values, and "[DONE]" as text."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if not event.startswith(":")]
    assert events.pop() == "", "the last event must end with a blank line"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    values = [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]
    for value in values:
        if value != "[DONE]":
            response.extensions["description"].check_event(value, response.request.url.path)
    return values


@contextmanager
def raw_connection(server: LiveServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        yield connection


def raw_request(server: LiveServer, path: str, body: bytes, *headers: str) -> tuple[int, dict[str, Any]]:
    """Post bytes as they are; returns the status and the JSON answer."""
    given = {name.lower() for name, _, _ in (header.partition(":") for header in headers)}
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "connection: close", *headers]
    lines += [] if "content-type" in given else ["content-type: application/json"]
    lines += [] if {"content-length", "transfer-encoding"} & given else [f"content-length: {len(body)}"]
    with raw_connection(server) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)
