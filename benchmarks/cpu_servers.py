"""The servers that benchmarks/cpu.py compares, and a burst of requests against one of them."""

from __future__ import annotations

import itertools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

SERVER = Path(__file__).parents[1] / "server.py"
NUM_REQUESTS, NUM_TOKENS = 8, 64
WORDS = "the cache holds keys and values of every token in pages that a table maps for each sequence "


@dataclass(frozen=True)
class Burst:
    """What a burst of requests saw."""

    tokens_per_second: float  # of all requests together, from the first byte sent to the last token
    first_token_ms: float  # median
    gap_p95_ms: float  # between tokens of one request
    health_p99_ms: float  # GET /health meanwhile


@contextmanager
def own_server(model: str, **config: str) -> Iterator[str]:
    settings = {
        "model": model,
        "port": str(free_port()),
        "generation_config": "none",
        "served_model_name": "m",
    } | config
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    with running([sys.executable, str(SERVER), "--device", "cpu", *words], int(settings["port"])) as url:
        yield url


@contextmanager
def llama_server(programs: Path, file: Path, threads: int) -> Iterator[str]:
    port = free_port()
    command = [programs / "llama-server", "-m", file, "-t", threads, "-np", NUM_REQUESTS, "-c", 8192, "--port", port]
    with running([*map(str, command), "--chat-template", "chatml"], port) as url:
        yield url


@contextmanager
def transformers_server(model: str) -> Iterator[str]:
    port = free_port()
    options = ["--device", "cpu", "--dtype", "bfloat16", "--continuous-batching", "--port", str(port)]
    with running([str(Path(sys.executable).parent / "transformers"), "serve", model, *options], port) as url:
        yield url


@contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    """A server process and its URL, once it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with {process.returncode}")
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def burst(url: str, number: int, extra: dict[str, object]) -> Burst:
    """8 prompts of about 130 tokens at once, 64 tokens each, greedy and streamed. Bursts of another number have other
    prompts from their first word on, so that nothing of them is in a cache. `extra` goes into every request.
    """
    model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    done = threading.Event()
    with ThreadPoolExecutor(NUM_REQUESTS + 1) as pool:
        health = pool.submit(poll_health, url, done)
        start = time.perf_counter()
        try:
            arrivals = list(pool.map(lambda place: stream(url, model, f"{number}.{place}", extra), range(NUM_REQUESTS)))
        finally:
            done.set()
        seconds = time.perf_counter() - start
    gaps = [1000 * (b - a) for times in arrivals for a, b in itertools.pairwise(times)]
    firsts = [1000 * (times[0] - start) for times in arrivals]
    ignores_eos = "ignore_eos" in extra  # then tokens without text, as special ones are, count too
    return Burst(
        (NUM_REQUESTS * NUM_TOKENS if ignores_eos else sum(map(len, arrivals))) / seconds,
        statistics.median(firsts),
        quantile(gaps, 0.95),
        quantile(health.result(), 0.99),
    )


def stream(url: str, model: str, title: str, extra: dict[str, object]) -> list[float]:
    """When each token of one request arrived."""
    text = f"{title} " + WORDS * 6 + "Count to one hundred in words."
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
    } | extra
    times = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            if choices[0].get("delta", {}).get("content"):
                times.append(time.perf_counter())
    return times


def poll_health(url: str, done: threading.Event) -> list[float]:
    """Milliseconds of GET /health, again and again until `done`."""
    took = []
    with httpx.Client(timeout=60) as client:
        while not done.wait(0.02):
            start = time.perf_counter()
            client.get(f"{url}/health")
            took.append(1000 * (time.perf_counter() - start))
    return took


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
