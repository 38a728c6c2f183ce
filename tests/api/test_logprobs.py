"""Log-probabilities in both routes, of answers and of prompts: right, complete and of one length."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from cupyllm.batch import BatchBuilder
from cupyllm.device import HostDevice
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.model import forward, logits
from cupyllm.plan import Plan, PlannedChunk
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence
from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the cat 猫 sat"


def model_logprobs(server: LiveServer, ids: list[int]) -> np.ndarray:
    """Log-probabilities of every token after each of `ids`, computed at once beside the server's engine: (T, V)."""
    engine, num_pages = server.loaded.engine, -(-len(ids) // 16)
    config = engine.runner.model.config
    cache = allocate_kv_cache(HostDevice(), config, num_pages=num_pages, page_size=16, dtype="float32")
    sequence = Sequence(0, ids, len(ids), SamplingParams(), 0, 1, frozenset(), page_table=list(range(num_pages)))
    batch = BatchBuilder(16).build(Plan([], [PlannedChunk(sequence, 0, len(ids))], []))
    hidden = forward(engine.ops, engine.runner.model, cache, batch)
    rows = np.arange(len(ids), dtype=np.int32)
    scores = logits(engine.ops, engine.runner.model, hidden, rows).astype(np.float64)[
        :, : server.loaded.tokenizer.num_tokens
    ]
    return (
        scores
        - scores.max(axis=1, keepdims=True)
        - np.log(np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    )


def complete(server: LiveServer, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    response = server.post(TEXT, body | fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


@pytest.mark.parametrize("count", [0, 1, 5])
def test_50_four_lists_of_one_length_with_the_models_own_numbers(server: LiveServer, count: int) -> None:
    choice = complete(server, logprobs=count, temperature=1.2, seed=5, frequency_penalty=1)
    ids, found = choice["token_ids"], choice["logprobs"]
    expected = model_logprobs(server, choice["prompt_token_ids"] + ids)[len(choice["prompt_token_ids"]) - 1 : -1]
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 6)
    np.testing.assert_allclose(found["token_logprobs"], expected[np.arange(6), ids], atol=1e-4)
    for place, top in enumerate(found["top_logprobs"]):
        best = np.sort(expected[place])[::-1][:count]
        assert len(top) in (max(count, 1), count + 1), "53: the chosen token is always among them"
        assert found["tokens"][place] in top
        np.testing.assert_allclose(sorted(top.values(), reverse=True)[:count], best, atol=1e-4)


def test_50_offsets_find_the_tokens_in_the_text(server: LiveServer) -> None:
    choice = complete(server, logprobs=0, max_tokens=40, temperature=1.5, seed=2)
    found, ids = choice["logprobs"], choice["token_ids"]
    for place, (token_id, offset) in enumerate(zip(ids, found["text_offset"], strict=True)):
        assert offset == len(server.loaded.tokenizer.decode(ids[:place]).rstrip("\ufffd")) or "\ufffd" in choice["text"]
        token = server.loaded.tokenizer.token_bytes(token_id)
        shown = found["tokens"][place]
        assert shown.encode() == token or shown == "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


@pytest.mark.parametrize("stream", [False, True])
def test_51_52_echo_scores_a_prompt_without_generating(server: LiveServer, stream: bool) -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": 2}
    if stream:
        events = server.post(TEXT, {"prompt": PROMPT, "stream": True, **fields}).text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        (chunk,) = (json.loads(event.removeprefix("data: ")) for event in events[:-1])
        choice = chunk["choices"][0]
    else:
        choice = complete(server, **fields)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    ids, found = server.loaded.tokenizer.encode(PROMPT), choice["logprobs"]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    expected = model_logprobs(server, ids)
    np.testing.assert_allclose(
        found["token_logprobs"][1:], [expected[t - 1, ids[t]] for t in range(1, len(ids))], atol=1e-4
    )
    assert len(found["tokens"]) == len(found["top_logprobs"]) == len(found["text_offset"]) == len(ids)


def test_52_a_prompt_that_is_read_without_a_token_has_a_usage(server: LiveServer) -> None:
    body = {"prompt": ["the", "cat sat"], "max_tokens": 0, "n": 2}
    answer = server.post(TEXT, body).json()
    assert [choice["text"] for choice in answer["choices"]] == [""] * 4
    assert answer["usage"]["completion_tokens"] == 0
    assert server.post(CHAT, {"messages": MESSAGES, "max_tokens": 0}).status_code == 400


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3, "temperature": 1, "seed": 1}, {"best_of": 3, "n": 2, "temperature": 1}]
)
def test_echo_stands_before_every_answer_and_its_offsets_go_on(server: LiveServer, fields: dict[str, Any]) -> None:
    body = {"prompt": [PROMPT, "the"], "max_tokens": 4, "logprobs": 1, "ignore_eos": True, **fields}
    plain = server.post(TEXT, body | {"seed": 1}).json()["choices"]
    echoed = server.post(TEXT, body | {"seed": 1, "echo": True}).json()["choices"]
    assert len(plain) == len(echoed) == 2 * fields.get("n", 1)
    for index, (one, other) in enumerate(zip(plain, echoed, strict=True)):
        prompt = body["prompt"][index // fields.get("n", 1)]
        count = len(server.loaded.tokenizer.encode(prompt))
        assert other["text"] == prompt + one["text"]
        assert other["logprobs"]["tokens"][count:] == one["logprobs"]["tokens"]
        np.testing.assert_allclose(
            other["logprobs"]["token_logprobs"][count:], one["logprobs"]["token_logprobs"], atol=1e-4
        )
        shifted = [offset + len(prompt) for offset in one["logprobs"]["text_offset"]]
        assert other["logprobs"]["text_offset"][count:] == shifted


def test_echo_without_logprobs_and_from_token_ids(server: LiveServer) -> None:
    ids = server.loaded.tokenizer.encode(PROMPT)
    assert complete(server, echo=True, prompt=ids) == complete(server, echo=True)
    assert complete(server, echo=True)["text"] == PROMPT + complete(server)["text"]


def test_streamed_pieces_joined_are_the_plain_answer(server: LiveServer) -> None:
    fields = {"logprobs": 2, "echo": True, "max_tokens": 20, "temperature": 1.5, "seed": 8}
    plain = complete(server, **fields)
    client, joined = server.openai(), {name: [] for name in plain["logprobs"]}
    text = ""
    for chunk in client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, stream=True, extra_body={"ignore_eos": True}, **fields
    ):
        text += chunk.choices[0].text
        for name, values in chunk.choices[0].logprobs or {}:
            joined[name] += values
    assert text == plain["text"]
    assert joined["tokens"] == plain["logprobs"]["tokens"]
    assert joined["text_offset"] == plain["logprobs"]["text_offset"]


@pytest.mark.parametrize("count", [None, 0, 4])
def test_34_chat_logprobs_have_an_entry_for_every_token(server: LiveServer, count: int | None) -> None:
    fields = {} if count is None else {"top_logprobs": count}
    answer = server.openai().chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, logprobs=True, max_tokens=9, temperature=1, seed=4,
        extra_body={"return_token_ids": True}, **fields
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    expected = model_logprobs(server, answer.prompt_token_ids + choice.token_ids)[len(answer.prompt_token_ids) - 1 :]
    for place, (token_id, entry) in enumerate(zip(choice.token_ids, choice.logprobs.content, strict=True)):
        assert bytes(entry.bytes or []) == server.loaded.tokenizer.token_bytes(token_id)
        assert math.isclose(entry.logprob, expected[place, token_id], abs_tol=1e-4)
        values = [top.logprob for top in entry.top_logprobs]
        np.testing.assert_allclose(values, np.sort(expected[place])[::-1][: count or 0], atol=1e-4)


def test_20_streamed_chat_logprobs_are_those_of_the_plain_answer(server: LiveServer) -> None:
    asked: Any = {"model": MODEL_NAME, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 15}
    asked |= {"temperature": 1.5, "seed": 6}
    plain = server.openai().chat.completions.create(**asked).choices[0].logprobs
    assert plain is not None
    streamed = []
    for chunk in server.openai().chat.completions.create(stream=True, **asked):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.token for entry in streamed] == [entry.token for entry in plain.content or []]


def test_no_logprobs_are_sent_unasked(server: LiveServer) -> None:
    assert complete(server)["logprobs"] is None
    answer = server.openai().chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=2)
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_prompt_logprobs_in_the_form_of_vllm(server: LiveServer, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
    answer = server.post(path, body | ({"prompt": PROMPT} if path == TEXT else {"messages": MESSAGES})).json()
    holder = answer["choices"][0] if path == TEXT else answer
    ids, found = holder["prompt_token_ids"], holder["prompt_logprobs"]
    expected = model_logprobs(server, ids)
    assert len(found) == len(ids)
    assert found[0] is None
    for place, entry in enumerate(found[1:], start=1):
        best = np.argsort(-expected[place - 1])[:2].tolist()
        assert {int(key) for key in entry} == {ids[place], *best}
        assert [entry[str(token_id)]["rank"] for token_id in best] == [1, 2]
        assert math.isclose(entry[str(ids[place])]["logprob"], expected[place - 1, ids[place]], abs_tol=1e-4)


def test_prompt_logprobs_are_refused_in_a_stream(server: LiveServer) -> None:
    refused = server.post(TEXT, {"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
