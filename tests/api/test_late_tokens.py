"""A server that reads tokens a step late, as on a GPU, answers as one that reads them at once."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.api.live_server import MESSAGES, LiveServer, frames, run_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "the cat", "n": 3, "temperature": 1, "seed": 1, "max_tokens": 30}),
    (TEXT, {"prompt": "the cat", "frequency_penalty": 1, "temperature": 1, "seed": 2, "max_tokens": 25}),
    (TEXT, {"prompt": ["the", "a cat sat"], "echo": True, "max_tokens": 0, "logprobs": 1}),
    (TEXT, {"prompt": "sat", "use_beam_search": True, "beam_width": 2, "n": 2, "max_tokens": 8}),
    (TEXT, {"prompt": "the cat", "stop": ["a", "e"], "temperature": 1.5, "seed": 3, "max_tokens": 60}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "temperature": 0, "max_tokens": 20}),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": [70, 71, 72], "seed": 4, "max_tokens": 20}),
    (CHAT, {"messages": MESSAGES, "min_tokens": 5, "seed": 5, "max_tokens": 12}),
    ("/v1/embeddings", {"input": ["the cat", "sat"]}),
]


def answer(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    found = response.json()
    if path == "/v1/embeddings":
        return [[round(x, 4) for x in item["embedding"]] for item in found["data"]]
    return [(choice.get("text"), choice.get("message"), choice["finish_reason"]) for choice in found["choices"]]


def streamed(server: LiveServer, path: str, body: dict[str, Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in frames(server.post(path, body | {"stream": True}))[:-1]:
        for choice in chunk["choices"]:
            piece = choice["text"] if path == TEXT else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def test_every_kind_of_request_side_by_side_gets_its_answer(model_folder: Path) -> None:
    with run_server(model_folder, overlap=False) as at_once:
        expected = [answer(at_once, path, body) for path, body in REQUESTS]
        texts = [streamed(at_once, path, body) for path, body in REQUESTS[4:8]]
    with run_server(model_folder, overlap=True, max_decode_batch_size=8) as late:
        jobs = list(range(len(REQUESTS))) * 4
        random.Random(0).shuffle(jobs)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda job: answer(late, *REQUESTS[job]), jobs))
            assert found == [expected[job] for job in jobs]
            assert list(pool.map(lambda request: streamed(late, *request), REQUESTS[4:8])) == texts
        assert late.get("/health").status_code == 200
        assert late.loaded.engine.stats.num_live_pages == 0
