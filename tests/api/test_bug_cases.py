"""Faults that servers of this kind had, seen over HTTP. docs/bug-cases.md lists them with all their tests."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.api.faults import FaultyOps, Turnstile, pass_until
from tests.api.live_server import MAX_MODEL_LEN, MESSAGES, LiveServer, frames, raw_request, run_server, wait_until
from tests.api.scripted import Actor, put_together

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ROUTES = [CHAT, TEXT]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


def ask(server: LiveServer, path: str, **fields: Any) -> Any:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "the weather in"}
    response = server.post(path, base | GREEDY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def token_ids(server: LiveServer, path: str, **fields: Any) -> list[int]:
    found: list[int] = ask(server, path, **fields)["choices"][0]["token_ids"]
    return found


def random_texts(count: int) -> list[str]:
    """Of all planes: combining marks, joiners, right to left, rare Han, emoji that take several tokens."""
    rng = random.Random(7)
    kinds = [
        "\u0300\u0301\u200d\u200e\u202e\ufe0f",
        "אבגدهو",
        "𠀀𪚥龘鿌",
        "\U0001fae0\U0001f979\U0001f9d1\U0001f680",
        "aé ß\n\t",
    ]
    letters = "".join(kinds) + "".join(chr(rng.choice([rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x110000)]))
                                       for _ in range(200))  # fmt: skip
    return ["".join(rng.choices(letters, k=rng.randint(20, 60))) for _ in range(count)]


@pytest.mark.parametrize("text", random_texts(25), ids=range(25))
def test_a1_bar_22_texts_of_all_planes_arrive_whole_streamed_and_plain(actor: Actor, text: str) -> None:
    decoded = actor.server.loaded.tokenizer.decode(actor.server.loaded.tokenizer.encode(text, control_tokens=False))
    for answer in (actor.ask(text), put_together(actor.ask_stream(text))):
        assert answer["message"]["content"] == decoded
        assert answer["finish_reason"] == "stop"


def test_a1_bytes_that_are_no_text_arrive_as_the_whole_decode_has_them(server: LiveServer) -> None:
    """Single bytes in any order, forced one by one: mostly broken characters."""
    tokenizer = server.loaded.tokenizer
    rng = random.Random(1)
    single = [i for i in range(tokenizer.num_tokens) if len(tokenizer.token_bytes(i)) == 1]
    for seed in range(6):
        body = {"prompt": "a", "max_tokens": 60, "temperature": 1, "seed": seed, "ignore_eos": True}
        body |= {"allowed_token_ids": rng.sample(single, 40), "return_token_ids": True}
        (choice,) = server.post(TEXT, body).json()["choices"]
        assert choice["text"] == tokenizer.decode(choice["token_ids"])
        pieces = [event["choices"][0]["text"] for event in frames(server.post(TEXT, body | {"stream": True}))[:-1]]
        assert "".join(pieces) == choice["text"]


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("DEFGHIJ", "ABC", "stop"), ("DEFGHIX", "ABCDEFGHIJ", "stop"), (["J", "GH"], "ABCDEF", "stop")],
)
def test_a2_a_stop_string_is_found_across_tokens(actor: Actor, stop: Any, text: str, reason: str) -> None:
    for answer in (actor.ask("ABCDEFGHIJ", stop=stop), put_together(actor.ask_stream("ABCDEFGHIJ", stop=stop))):
        assert (answer["message"]["content"], answer["finish_reason"]) == (text, reason)


@pytest.mark.parametrize("n", [1, 2])
def test_a5_usage_is_the_same_streamed_and_plain(server: LiveServer, n: int) -> None:
    for path in ROUTES:
        plain = ask(server, path, n=n)["usage"]
        base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "the weather in"}
        body = base | GREEDY | {"n": n, "stream": True, "stream_options": {"include_usage": True}}
        usages = [event["usage"] for event in frames(server.post(path, body))[:-1]]
        assert usages[:-1] == [None] * (len(usages) - 1)
        for usage in (plain, usages[-1]):
            assert usage["prompt_tokens_details"].pop("cached_tokens") <= usage["prompt_tokens"]
        assert usages[-1] == plain
        assert plain["completion_tokens"] == 12 * n


@pytest.mark.parametrize("path", ROUTES)
def test_a5_usage_in_every_chunk_grows_to_that_of_the_last(server: LiveServer, path: str) -> None:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "the weather in"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = frames(server.post(path, base | GREEDY | {"stream": True, "stream_options": options}))[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == sum(
        len(choice["token_ids"]) for e in events for choice in e["choices"] if "token_ids" in choice
    )
    unasked = server.post(path, base | {"stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in event for event in frames(unasked)[:-1])


@pytest.mark.parametrize("path", ROUTES)
def test_a6_a_temperature_near_zero_is_greedy_beside_hot_neighbours(server: LiveServer, path: str) -> None:
    greedy = token_ids(server, path)
    cold = [0, 1e-12, 1e-5, 1e-4]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(token_ids, server, path, temperature=t) for t in (*cold, 1, *cold, 2)]
        answers = [future.result() for future in asked]
    assert answers[:4] == answers[5:9] == [greedy] * 4
    (choice,) = ask(server, TEXT, temperature=1e-12, logprobs=5)["choices"]
    assert all(-9999 <= value <= 0 for value in choice["logprobs"]["token_logprobs"])


FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
FLOATS += ["length_penalty"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", [*FLOATS, "logit_bias", "top_k", "max_tokens", "n", "stop_token_ids"])
def test_a7_no_field_takes_a_number_that_json_does_not_have(server: LiveServer, field: str, literal: str) -> None:
    value = {"logit_bias": f'{{"5": {literal}}}', "stop_token_ids": f"[{literal}]"}.get(field, literal)
    for path, given in ((CHAT, f'"messages": {json.dumps(MESSAGES)}'), (TEXT, '"prompt": "a"')):
        status, answer = raw_request(server, path, f'{{{given}, "{field}": {value}}}'.encode())
        assert status == 400
        assert literal in answer["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_a8_edges_of_the_filters(server: LiveServer, path: str) -> None:
    width = server.loaded.engine.admission.model_config.vocab_size
    hot = {"temperature": 1.5, "seed": 11}
    free = token_ids(server, path, **hot)
    for off in ({"top_k": 0}, {"top_k": -1}, {"top_k": width}, {"top_k": width + 1}, {"top_p": 1}, {"min_p": 0}):
        assert token_ids(server, path, **hot, **off) == free, off
    greedy = token_ids(server, path)
    for tight in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1}):
        assert token_ids(server, path, **hot, **tight) == greedy, tight
    assert free != greedy
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
    for wrong in ({"top_k": -2}, {"top_p": 0}, {"top_p": 1.0001}, {"min_p": 1.1}, {"min_p": -0.1}):
        assert server.post(path, base | wrong).json()["error"]["param"] == next(iter(wrong))


def test_a10_ids_beyond_the_logits_are_refused_and_the_last_one_is_not(server: LiveServer) -> None:
    width = server.loaded.engine.admission.model_config.vocab_size
    for name, value in (("logit_bias", {str(width): 1}), ("stop_token_ids", [width]), ("allowed_token_ids", [width])):
        response = server.post(TEXT, {"prompt": "a", "min_tokens": 1, name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith(name)
    ask(server, TEXT, logit_bias={str(width - 1): -1}, stop_token_ids=[width - 1])
    assert token_ids(server, TEXT, temperature=1, seed=2**64 - 1) == token_ids(server, TEXT, temperature=1, seed=-1)


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a11_penalties_alone_in_a_batch_and_after_a_cache_hit(server: LiveServer, field: str) -> None:
    prompt = [5, 6, 7] * 20
    few = {"prompt": prompt, "allowed_token_ids": [*range(60, 70)], "cache_salt": f"a11-{field}"}
    alone = token_ids(server, TEXT, **few, **{field: 2})
    with ThreadPoolExecutor(4) as pool:
        both = [pool.submit(token_ids, server, TEXT, **few, **extra) for extra in ({field: 2}, {}, {field: 2}, {})]
    assert both[0].result() == both[2].result() == alone
    assert both[1].result() == both[3].result() == token_ids(server, TEXT, **few) != alone
    assert ask(server, TEXT, **few, **{field: 2})["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_a13_bytes_of_the_entries_join_to_the_text(actor: Actor) -> None:
    text = "a\U0001fae0b\U0001f979"
    choice = actor.ask(text, logprobs=True, top_logprobs=2, ignore_eos=True, max_tokens=60)
    entries = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries if entry["token"] != "<|im_end|>")
    assert joined.decode("utf-8", "replace").startswith(text)
    assert all(entry["bytes"] is not None and entry["logprob"] <= 0 for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a15_a_prompt_one_short_of_the_context_gives_one_token(server: LiveServer, path: str, stream: bool) -> None:
    def body(count: int) -> dict[str, Any]:
        """With a prompt of so many tokens."""
        if path == TEXT:
            return {"prompt": [5] * count}
        words = count - len(ask(server, CHAT, messages=[{"role": "user", "content": ""}])["prompt_token_ids"])
        return {"messages": [{"role": "user", "content": "1" * words}]}

    fits = server.post(path, body(MAX_MODEL_LEN - 1) | {"stream": stream, "ignore_eos": True})
    assert fits.status_code == 200, fits.text
    last = frames(fits)[-2] if stream else fits.json()
    assert last["choices"][0]["finish_reason"] == "length"
    assert stream or last["usage"]["completion_tokens"] == 1
    for count in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        error = server.post(path, body(count) | {"stream": stream}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"holds {MAX_MODEL_LEN} tokens" in error["message"]
        assert f"{count} in the prompt" in error["message"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a16_one_table_of_limits_for_both_routes(server: LiveServer, path: str, field: str) -> None:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
    for value, expected in ((1, 1), (None, MAX_MODEL_LEN if path == CHAT else 16)):
        usage = server.post(path, base | {field: value, "ignore_eos": True}).json()["usage"]
        assert (usage["total_tokens"] if value is None and path == CHAT else usage["completion_tokens"]) == expected
    nothing = server.post(path, base | {field: 0})
    assert nothing.status_code == 400 if path == CHAT else nothing.json()["usage"]["completion_tokens"] == 0
    for value in (-1, MAX_MODEL_LEN, 10**18, "5", 1.5, True):
        answer = server.post(path, base | {field: value})
        assert answer.status_code == 400, value
    for smaller, larger in itertools.permutations((3, 5)):
        both = {"max_tokens": smaller, "max_completion_tokens": larger, "ignore_eos": True}
        assert server.post(path, base | both).json()["usage"]["completion_tokens"] == larger


def test_a30_of_a_burst_only_so_many_are_inside_and_the_rest_are_refused(model_folder: Path) -> None:
    """8 run, 16 wait, 200 come at once, some of them for two sequences."""
    ops: list[FaultyOps] = []
    settings = {"max_decode_batch_size": 8, "max_waiting": 16, "kv_cache_gib": 0.02}
    with run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded)), **settings) as server:
        most = [0, 0]

        def look(number: int) -> None:
            stats = server.worker.stats
            most[:] = max(most[0], stats.num_running), max(most[1], stats.num_waiting)

        def post(number: int) -> Any:
            return server.post(TEXT, {"prompt": "a", "max_tokens": 4, "n": 1 + number % 2, "ignore_eos": True})

        with ThreadPoolExecutor(200) as pool:
            with Turnstile(ops[0]) as turnstile:
                first = pool.submit(post, 0)
                pass_until(turnstile, lambda: server.worker.stats.num_running == 1 or first.done())
                burst = [pool.submit(post, number) for number in range(199)]
                wait_until(lambda: sum(future.done() for future in burst) >= 199 - 16, "the rest have been refused")
            ops[0].before_step = look
            answers = [future.result() for future in (first, *burst)]
        assert most[0] <= 8
        assert most[1] <= 16
        refused = [answer for answer in answers if answer.status_code != 200]
        assert {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert 199 - 16 <= len(refused) < 199
        assert post(0).status_code == 200
