"""Many clients at a server whose cache is much too small for all: nothing is lost, doubled, crossed or left behind."""

from __future__ import annotations

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cupyllm.kv_cache import bytes_per_page
from cupyllm.model_config import read_model_config
from tests.api.live_server import LiveServer, frames, run_server, wait_until

TEXT = "/v1/completions"
AT_A_TIME, NUM_REQUESTS = 64, 240
LONGEST_PROMPT, MOST_TOKENS = 80, 16
NUM_PAGES, PAGE_SIZE = 12, 16
OPEN_FILES = Path("/proc/self/fd")


def draw_requests() -> list[dict[str, Any]]:
    """Prompts of any length, a third of which begin alike; greedy and seeded in turns."""
    rng = random.Random(0)
    beginning = [rng.randrange(256) for _ in range(LONGEST_PROMPT)]
    requests = []
    for number in range(NUM_REQUESTS):
        length = rng.randint(1, LONGEST_PROMPT)
        alike = rng.randint(0, length) if number % 3 == 0 else 0
        prompt = beginning[:alike] + [rng.randrange(256) for _ in range(length - alike)]
        chosen = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
        chosen |= {"max_tokens": rng.randint(1, MOST_TOKENS), "ignore_eos": True}
        requests.append(chosen | {"prompt": prompt, "return_token_ids": True, "logprobs": 0})
    return requests


def ask(server: LiveServer, http: httpx.Client, request: dict[str, Any], stream: bool) -> dict[str, Any]:
    """What an answer says, whether it came in one piece or in many; ids and logprobs in the order they came."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = http.post(server.url + TEXT, json=request | options)
    assert response.status_code == 200, response.text
    *events, done = frames(response) if stream else (response.json(), "[DONE]")
    assert done == "[DONE]"
    choices = [choice for event in events for choice in event["choices"]]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert choices[-1]["finish_reason"] == reason, "nothing follows the end"
    shown = [choice["logprobs"]["token_logprobs"] for choice in choices if choice["logprobs"]]
    return {
        "ids": [token_id for choice in choices for token_id in choice["token_ids"]],
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": [value for values in shown for value in values],
        "tokens": (events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["completion_tokens"]),
        "reason": reason,
    }


def leave_early(server: LiveServer, http: httpx.Client, request: dict[str, Any], after: int) -> None:
    """Start a stream and go away after some pieces of it."""
    with http.stream("POST", server.url + TEXT, json=request | {"stream": True}) as response:
        for number, _ in enumerate(response.iter_raw()):
            if number >= after:
                return


def ask_many(server: LiveServer, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All answers, `AT_A_TIME` at once, every other one streamed, and for ten of them one client that leaves."""
    answers = []
    hooks = server.http.event_hooks
    with httpx.Client(timeout=120, event_hooks=hooks) as http, ThreadPoolExecutor(AT_A_TIME) as pool:
        for number, request in enumerate(requests):
            answers.append(pool.submit(ask, server, http, request, stream=number % 4 > 1))
            if number % 10 == 0:
                pool.submit(leave_early, server, http, request, number % 7)
    return [answer.result() for answer in answers]


def num_open_files() -> int:
    return len(os.listdir(OPEN_FILES)) if OPEN_FILES.exists() else 0


def is_idle(server: LiveServer) -> bool:
    stats = server.worker.stats
    return (stats.num_running, stats.num_waiting, stats.num_live_pages, server.worker.num_live) == (0, 0, 0, 0)


def test_many_at_once_get_what_each_gets_alone_and_nothing_stays(server: LiveServer, model_folder: Path) -> None:
    requests = draw_requests()
    expected = [ask(server, server.http, request, stream=False) for request in requests]
    for answer in expected:
        answer["logprobs"] = pytest.approx(answer["logprobs"], abs=1e-4)  # equal but for rounding
    page_bytes = bytes_per_page(read_model_config(model_folder), PAGE_SIZE, "float32")
    limits = {"max_model_len": LONGEST_PROMPT + MOST_TOKENS, "max_decode_batch_size": 16, "max_step_tokens": 48}
    num_threads = threading.active_count()
    with run_server(model_folder, kv_cache_gib=NUM_PAGES * page_bytes / 2**30, **limits) as small:
        check_many(small, requests, expected)
    del small
    gc.collect()  # ops have threads for as long as somebody refers to them
    wait_until(lambda: threading.active_count() <= num_threads, "every thread of the server has ended")


def check_many(server: LiveServer, requests: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Ask twice, the first time to open what stays open; then nothing is more than it was."""
    found = ask_many(server, requests[:80])
    wait_until(lambda: is_idle(server), "every request has left the engine")
    before = num_open_files()
    found += ask_many(server, requests[80:])
    assert found == expected
    wait_until(lambda: is_idle(server), "every request has left the engine")
    wait_until(lambda: num_open_files() <= before, "every connection is closed")
    worker = server.worker
    assert worker._owners == {}
    assert (worker._waiting._coming, worker._waiting._leaving) == (0, 0)
    assert worker.stats.num_cached_pages + worker.stats.num_free_pages == NUM_PAGES
    assert worker.stats.num_preemptions > 10, "a cache this small must preempt, or the test is void"
    assert worker.stats.num_cached_pages > 0
