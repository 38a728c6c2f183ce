"""Several answers to a prompt, the best of several, priorities, and what the prefix cache says. Numbers are the HTTP
contract's.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cupyllm import LLM, SamplingParams
from tests.api.faults import FaultyOps, Turnstile, pass_until, start_stream
from tests.api.live_server import MAX_MODEL_LEN, MESSAGES, MODEL_NAME, LiveServer, frames, run_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HOT = {"temperature": 1.2, "max_tokens": 20, "ignore_eos": True, "seed": 11}
PROMPTS = ["the weather in", "system user"]


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return HOT | ({"messages": MESSAGES} if path == CHAT else {"prompt": PROMPTS[0]}) | fields


def ask(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, body_for(path, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def texts(answer: dict[str, Any]) -> list[str]:
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def streamed(events: list[Any]) -> list[tuple[str, str]]:
    """Text and finish reason of each choice of a stream; nothing may follow a finish reason."""
    pieces: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            assert choice["index"] not in reasons
            pieces[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if choice["finish_reason"] is not None:
                reasons[choice["index"]] = choice["finish_reason"]
    return [(pieces[index], reasons[index]) for index in sorted(pieces)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_choice_k_is_the_answer_of_a_single_request_with_seed_plus_k(server: LiveServer, path: str) -> None:
    together = texts(ask(server, path, n=5))
    assert len(set(together)) == 5
    assert together == [texts(ask(server, path, seed=11 + k))[0] for k in range(5)]
    assert texts(ask(server, path, n=2, seed=2**64 - 1)) == [texts(ask(server, path, seed=seed))[0] for seed in (-1, 0)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_choices_without_a_seed_differ_and_greedy_ones_do_not(server: LiveServer, path: str) -> None:
    assert len(set(texts(ask(server, path, n=4, seed=None)))) == 4
    assert len(set(texts(ask(server, path, n=4, temperature=0)))) == 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_16_streamed_choices_are_those_of_the_plain_answer(server: LiveServer, path: str) -> None:
    plain = ask(server, path, n=3)
    events = frames(server.post(path, body_for(path, n=3, stream=True)))
    assert streamed(events) == [(text, "length") for text in texts(plain)]
    if path == CHAT:
        for index in range(3):
            deltas = [e["choices"][0]["delta"] for e in events[:-1] if e["choices"][0]["index"] == index]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert deltas[-1] == {}
            assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_48_choice_p_times_n_plus_k_is_answer_k_to_prompt_p(server: LiveServer, stream: bool) -> None:
    expected = [texts(ask(server, TEXT, prompt=prompt, seed=11 + k))[0] for prompt in PROMPTS for k in range(3)]
    fields = {"prompt": PROMPTS, "n": 3, "return_token_ids": True}
    prompt_ids = [server.loaded.tokenizer.encode(prompt) for prompt in PROMPTS for _ in range(3)]
    if stream:
        events = frames(server.post(TEXT, body_for(TEXT, stream=True, **fields)))
        assert [text for text, _ in streamed(events)] == expected
        choices = [e["choices"][0] for e in events[:-1]]
        assert {c["index"]: c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c} == dict(
            enumerate(prompt_ids)
        )
    else:
        answer = ask(server, TEXT, **fields)
        assert texts(answer) == expected
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompt_ids


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_23_usage_counts_a_prompt_once_and_every_output_token(server: LiveServer, path: str) -> None:
    one, many = ask(server, path)["usage"], ask(server, path, n=4)["usage"]
    assert many["prompt_tokens"] == one["prompt_tokens"]
    assert many["completion_tokens"] == 4 * one["completion_tokens"] == 80
    assert many["total_tokens"] == many["prompt_tokens"] + 80
    body = body_for(path, n=4, stream=True, stream_options={"include_usage": True})
    assert frames(server.post(path, body))[-2]["usage"]["completion_tokens"] == 80


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stop_string_ends_only_its_choice(server: LiveServer, path: str) -> None:
    first, *others = texts(ask(server, path, n=4))
    stop = next(first[i : i + 3] for i in range(2, 20) if not any(first[i : i + 3] in other for other in others))
    answer = ask(server, path, n=4, stop=stop)
    assert texts(answer) == [first[: first.index(stop)], *others]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length", "length", "length"]
    body = body_for(path, n=4, stop=stop, stream=True)
    assert [text for text, _ in streamed(frames(server.post(path, body)))] == texts(answer)


def test_the_official_client_gets_n_choices(server: LiveServer) -> None:
    create = server.openai().chat.completions.create
    plain = create(model=MODEL_NAME, messages=MESSAGES, n=3, seed=5, max_tokens=4)
    assert [choice.index for choice in plain.choices] == [0, 1, 2]
    pieces: dict[int, str] = defaultdict(str)
    for chunk in create(model=MODEL_NAME, messages=MESSAGES, n=3, seed=5, max_tokens=4, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [pieces[index] for index in range(3)] == [choice.message.content for choice in plain.choices]


def test_54_best_of_returns_the_answers_that_are_most_likely_per_token(server: LiveServer, model_folder: Path) -> None:
    llm = LLM(str(model_folder), max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.02)
    expected = []
    for output in llm.generate(PROMPTS, SamplingParams(**HOT, n=6, logprobs=0), show_progress=False):
        means = {a.text: sum(token.logprob for token in a.logprobs) / len(a.logprobs) for a in output.outputs}
        assert len(means) == 6
        expected += sorted(means, key=lambda text: -means[text])[:2]
    answer = ask(server, TEXT, prompt=PROMPTS, n=2, best_of=6)
    assert texts(answer) == expected
    assert answer["usage"]["completion_tokens"] == 2 * 6 * 20
    assert all(choice["logprobs"] is None for choice in answer["choices"]), "they were not asked for"


@pytest.mark.parametrize(("n", "best_of", "fits"), [(1, 1, True), (1, 2, False), (2, 2, False)])
def test_54_best_of_cannot_be_streamed(server: LiveServer, n: int, best_of: int, fits: bool) -> None:
    response = server.post(TEXT, body_for(TEXT, n=n, best_of=best_of, stream=True))
    assert response.status_code == (200 if fits else 400)
    if not fits:
        assert response.json()["error"]["param"] == "best_of"


def test_54_best_of_is_at_least_n(server: LiveServer) -> None:
    error = server.post(TEXT, body_for(TEXT, n=3, best_of=2)).json()["error"]
    assert (error["param"], error["message"]) == ("best_of", "best_of must be from n (3) to 16")
    assert sorted(texts(ask(server, TEXT, n=3, best_of=3))) == sorted(texts(ask(server, TEXT, n=3)))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_lower_priority_runs_first(model_folder: Path, path: str) -> None:
    ops: list[FaultyOps] = []
    settings: dict[str, Any] = {"max_decode_batch_size": 1}
    with (
        run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded)), **settings) as server,
        ThreadPoolExecutor(4) as pool,
        Turnstile(ops[0]) as turnstile,
    ):
        running = start_stream(server, turnstile, pool, body_for(TEXT, max_tokens=400))
        pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
        usual = pool.submit(ask, server, path, max_tokens=400)
        pass_until(turnstile, lambda: server.worker.stats.num_waiting == 1)
        urgent = pool.submit(ask, server, path, priority=-1)
        pass_until(turnstile, lambda: server.worker.stats.num_waiting == 2)
        running.close()
        pass_until(turnstile, lambda: usual.done() or urgent.done())
        assert urgent.done()
        assert not usual.done()


def cached_tokens(server: LiveServer, path: str, **fields: Any) -> int:
    return ask(server, path, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)])
def test_24_cached_tokens_are_whole_pages_and_never_the_last_token(
    server: LiveServer, length: int, cached: int
) -> None:
    fields = {"prompt": [5] * length, "cache_salt": uuid.uuid4().hex}
    assert [cached_tokens(server, TEXT, **fields) for _ in range(3)] == [0, cached, cached]
    assert cached_tokens(server, TEXT, **fields, n=3) == cached


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_24_cached_tokens_are_summed_over_prompts_plain_and_streamed(server: LiveServer, path: str) -> None:
    fields: dict[str, Any] = {"cache_salt": uuid.uuid4().hex}
    if path == TEXT:
        fields["prompt"] = [[5] * 20, [6] * 40, [7] * 10]
    first, second = (ask(server, path, **fields)["usage"] for _ in range(2))
    body = body_for(path, stream=True, stream_options={"include_usage": True}, **fields)
    assert frames(server.post(path, body))[-2]["usage"] == second
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    expected = 16 + 32 if path == TEXT else (first["prompt_tokens"] - 1) // 16 * 16
    assert second["prompt_tokens_details"] == {"cached_tokens": expected}
    assert expected > 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_salt_shares_cached_pages_with_its_like_only(server: LiveServer, path: str) -> None:
    one, other = uuid.uuid4().hex, "\U0001fae0" * 256
    fields: dict[str, Any] = {"prompt": [5] * 40} if path == TEXT else {}
    cached_tokens(server, path, **fields)
    assert cached_tokens(server, path, **fields) > 0
    assert [cached_tokens(server, path, **fields, cache_salt=salt) > 0 for salt in (one, other, one, other)] == [
        *(False, False, True, True)
    ]


def test_24_the_official_client_reads_cached_tokens(server: LiveServer) -> None:
    create = server.openai().chat.completions.create
    for _ in range(2):
        usage = create(model=MODEL_NAME, messages=MESSAGES, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_without_a_prefix_cache_no_token_is_cached(model_folder: Path) -> None:
    with run_server(model_folder, prefix_cache=False) as server:
        assert [cached_tokens(server, TEXT, prompt=[5] * 40, n=2) for _ in range(2)] == [0, 0]


def test_answers_that_find_no_row_are_recomputed_and_change_neither_text_nor_usage(
    server: LiveServer, model_folder: Path
) -> None:
    fields: dict[str, Any] = {"prompt": [5] * 40, "n": 5, "cache_salt": uuid.uuid4().hex}
    with run_server(model_folder, max_decode_batch_size=2) as narrow:
        answer = ask(narrow, TEXT, **fields)
    expected = ask(server, TEXT, **fields)
    assert texts(answer) == texts(expected)
    assert answer["usage"] == expected["usage"]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
