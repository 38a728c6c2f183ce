"""server.py as a process: start, drain, second signal, kill and start again."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.live_server import MODEL_NAME, wait_until

ROOT = Path(__file__).parents[2]
LONG = {"prompt": "the", "temperature": 0, "max_tokens": 900, "ignore_eos": True, "stream": True}


class Process:
    """A running server.py and where it listens."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        assert popen.stdout is not None
        self.banner = []
        for line in popen.stdout:
            self.banner.append(line.rstrip())
            if line.startswith("try"):
                break
        (url,) = [line.split()[1] for line in self.banner if line.startswith("url ")]
        self.url = url
        self.port = int(url.rpartition(":")[2])

    def status(self, path: str) -> int:
        return httpx.get(self.url + path).status_code

    def post_status(self) -> int:
        return httpx.post(self.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code

    def stream(self, started: list[int]) -> str:
        """The whole text of a long stream; notes when its first bytes have come."""
        with httpx.stream("POST", self.url + "/v1/completions", json=LONG, timeout=60) as response:
            text = ""
            for piece in response.iter_text():
                if not text:
                    started.append(1)
                text += piece
        return text


@contextmanager
def process(folder: Path, *arguments: str, port: int = 0) -> Iterator[Process]:
    settings = ["--model", str(folder), "--served_model_name", MODEL_NAME, "--port", str(port)]
    settings += ["--kv_cache_gib", "0.05", "--api_key_env", "NOT_SET_IN_TESTS", *arguments]
    command = [sys.executable, str(ROOT / "server.py"), "--config", str(ROOT / "configs" / "default.json"), *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as popen:
        try:
            yield Process(popen)
        finally:
            popen.kill()


@contextmanager
def streaming(live: Process, count: int) -> Iterator[list[Any]]:
    """`count` long streams under way."""
    started: list[int] = []
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(live.stream, started) for _ in range(count)]
        wait_until(lambda: len(started) == count, "every stream has begun")
        yield futures


def test_the_banner_shows_facts_url_and_a_request_that_works(model_folder: Path) -> None:
    with process(model_folder) as live:
        assert [line.split()[0] for line in live.banner] == [
            "model",
            "device",
            "dtype",
            "cache",
            "context",
            "url",
            "try",
        ]
        url, kind, body = re.fullmatch(r"try +curl (\S+) -H '(.+)' -d '(.+)'", live.banner[-1]).groups()
        name, _, value = kind.partition(": ")
        response = httpx.post(url, content=body, headers={name: value}, timeout=30)
        assert response.json()["model"] == MODEL_NAME


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_running_streams_finish(model_folder: Path, number: signal.Signals) -> None:
    with process(model_folder) as live:
        with streaming(live, 4) as streams:
            live.popen.send_signal(number)
            wait_until(lambda: live.status("/ready") == 503, "/ready tells that the server stops")
            assert live.status("/health") == 200
            assert live.post_status() == 503
            texts = [stream.result() for stream in streams]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert all('"finish_reason": "length"' in text for text in texts)
        assert live.popen.wait(10) == 0
        assert "Traceback" not in live.popen.stderr.read()


def test_streams_that_outlive_the_drain_limit_end_with_an_error_frame(model_folder: Path) -> None:
    with process(model_folder, "--drain_seconds", "0") as live:
        with streaming(live, 2) as streams:
            live.popen.send_signal(signal.SIGTERM)
            texts = [stream.result() for stream in streams]
        for text in texts:
            error = json.loads(text.rstrip().rpartition("data: ")[2])["error"]
            assert (error["code"], error["message"]) == ("unavailable", "the server is stopping")
        assert live.popen.wait(10) == 0


def test_a_second_signal_ends_at_once(model_folder: Path) -> None:
    with process(model_folder) as live, streaming(live, 1) as streams:
        live.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: live.status("/ready") == 503, "/ready tells that the server stops")
        live.popen.send_signal(signal.SIGTERM)
        assert live.popen.wait(10) == 128 + signal.SIGTERM
        with pytest.raises(httpx.RemoteProtocolError):
            streams[0].result()


def test_a_killed_server_can_be_started_again_on_its_port(model_folder: Path) -> None:
    with process(model_folder) as live, httpx.Client() as client:
        # A connection that is open when the server dies keeps its port in TIME_WAIT.
        assert client.get(live.url + "/health").status_code == 200
        live.popen.kill()
        live.popen.wait(10)
        with process(model_folder, port=live.port) as again:
            assert again.port == live.port
            assert again.post_status() == 200


def test_nothing_listens_when_the_model_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(ROOT / "server.py"), "--model", str(tmp_path), "--port", str(port)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.startswith("error: ")
    assert finished.stderr.count("\n") == 1
