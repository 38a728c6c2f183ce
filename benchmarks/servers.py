"""Servers for benchmarks, each in a process of its own: ours, llama.cpp's and transformers'.

A server that is not being measured can be paused, so that several can be up, and measured in turns, on one machine.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).parents[1]
START_SECONDS = 600
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Server:
    """A running server. `model` is the name that requests must give, None where any or the first listed will do."""

    name: str
    url: str
    process: subprocess.Popen[str]
    model: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let a paused server run, and pause it again."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)


@contextmanager
def own_server(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`python server.py` with these arguments, on a free port; `environment` is added to ours."""
    command = [sys.executable, str(REPOSITORY / "server.py"), *arguments, "--port", "0", "--log_level", "warning"]

    def find_url(process: subprocess.Popen[str], log: IO[str]) -> str | None:
        found = re.search(r"^url +(http://\S+)$", Path(log.name).read_text(encoding="utf-8"), re.MULTILINE)
        return found.group(1) if found else None

    with _process(command, find_url, environment) as (process, url):
        yield Server("cupyllm", url, process)


@contextmanager
def llama_server(program: str, gguf: Path, *, slots: int, context: int, threads: int) -> Iterator[Server]:
    """llama.cpp's server with `slots` of `context` tokens each."""
    port = _free_port()
    command = [program, "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--threads", str(threads)]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * context)]
    with _process(command, _answers_at(f"http://127.0.0.1:{port}", "/health")) as (process, url):
        yield Server("llama.cpp server", url, process)


@contextmanager
def transformers_server(program: str, model: Path, *, dtype: str) -> Iterator[Server]:
    """`transformers serve` with continuous batching, on the CPU."""
    port = _free_port()
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", dtype]
    # Its cache takes nine tenths of the memory otherwise, with other servers beside it.
    command += ["--continuous-batching", "--cb-max-memory-percent", "0.3"]
    with _process(command, _answers_at(f"http://127.0.0.1:{port}", "/health")) as (process, url):
        yield Server("transformers serve", url, process, model=str(model))


@contextmanager
def _process(
    command: list[str],
    find_url: Callable[[subprocess.Popen[str], IO[str]], str | None],
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server and wait for its URL; end it, and what it has started, afterwards."""
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        variables = {**os.environ, **(environment or {})}
        # Whoever ends this process ends the servers, too: a paused one would otherwise be left behind.
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=variables, start_new_session=True)
        try:
            deadline = time.monotonic() + START_SECONDS
            while (url := find_url(process, log)) is None:  # type: ignore[arg-type]
                if process.poll() is not None or time.monotonic() > deadline:
                    last = Path(log.name).read_text(encoding="utf-8", errors="replace")[-2000:]
                    sys.exit(f"the server did not start: {' '.join(command)}\n{last}")
                time.sleep(POLL_SECONDS)
            yield process, url
        finally:
            for number in (signal.SIGCONT, signal.SIGTERM):
                _signal(process, number)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.wait()
            signal.signal(signal.SIGTERM, before)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _answers_at(url: str, path: str) -> Callable[[subprocess.Popen[str], IO[str]], str | None]:
    def find_url(process: subprocess.Popen[str], log: IO[str]) -> str | None:
        try:
            with urllib.request.urlopen(url + path, timeout=5) as answer:
                return url if answer.status == 200 else None
        except (urllib.error.URLError, OSError):
            return None

    return find_url


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
