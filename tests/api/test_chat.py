"""/v1/chat/completions. Numbers in names are those of the HTTP contract's statements."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cupyllm import LLM, SamplingParams
from tests.api.live_server import MAX_MODEL_LEN, MESSAGES, MODEL_NAME, LiveServer, frames

PATH = "/v1/chat/completions"


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {"messages": MESSAGES, "temperature": 0, "max_tokens": 24} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def ask_stream(server: LiveServer, **fields: Any) -> list[Any]:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, "stream": True} | fields
    return frames(server.post(PATH, body))


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def joined(events: list[Any]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events[:-1] for choice in event["choices"])


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> LLM:
    return LLM(str(model_folder), max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.02)


def test_21_shape_of_an_answer(server: LiveServer) -> None:
    answer = ask(server)
    choice = answer["choices"][0]
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL_NAME)
    assert (choice["index"], choice["message"]["role"], choice["message"]["refusal"]) == (0, "assistant", None)
    assert choice["finish_reason"] == "length"


def test_12_13_15_shape_of_chunks(server: LiveServer) -> None:
    events = ask_stream(server)
    assert events.pop() == "[DONE]"
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
    reasons = [e["choices"][0]["finish_reason"] for e in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert not any("usage" in e for e in events)


def test_14_usage_chunk_comes_last_when_asked(server: LiveServer) -> None:
    *events, usage, done = ask_stream(server, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == ask(server)["usage"]
    assert all(e["usage"] is None for e in events)


@pytest.mark.parametrize("options", [{"include_usage": False}, {}, {"include_usage": None}, None])
def test_15_no_usage_unless_asked(server: LiveServer, options: Any) -> None:
    assert not any("usage" in e for e in ask_stream(server, stream_options=options)[:-1])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 7, "max_tokens": 60},
        {"temperature": 0.8, "seed": 2, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
        {"ignore_eos": True, "max_tokens": 200},
    ],
)
def test_streamed_and_plain_text_equal_that_of_llm(server: LiveServer, llm: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(**({"temperature": 0, "max_tokens": 24} | fields))
    expected = llm.chat(MESSAGES, params)[0].outputs[0]
    answer = ask(server, return_token_ids=True, **fields)
    events = ask_stream(server, return_token_ids=True, **fields)
    assert text_of(answer) == joined(events) == expected.text
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    streamed = [i for e in events[:-1] for choice in e["choices"] for i in choice.get("token_ids", [])]
    assert streamed == list(expected.token_ids)
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


def test_18_a_stop_string_is_cut_away_streamed_and_plain(server: LiveServer) -> None:
    text = text_of(ask(server))
    stop = text[8:12]
    first = text.index(stop)
    answer = ask(server, stop=stop)
    assert text_of(answer) == text[:first]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 24
    assert joined(ask_stream(server, stop=["never there", stop])) == text[:first]


def test_18_the_start_of_a_stop_string_that_does_not_come_is_shown(server: LiveServer) -> None:
    text = text_of(ask(server))
    stop = [text[-3:] + "x", text[4:8] + "\0never"]
    assert text_of(ask(server, stop=stop)) == joined(ask_stream(server, stop=stop)) == text
    assert ask(server, stop=stop)["choices"][0]["finish_reason"] == "length"


def test_19_no_character_is_split_between_chunks(server: LiveServer) -> None:
    emoji = "\U0001fae0\U0001f979龜"
    ids = server.loaded.tokenizer.encode(emoji)
    assert len(ids) > 3 * len(emoji) - 1, "the characters must take several tokens each"
    # The model is random, so the streamed text is compared with the whole decode of its tokens.
    for seed in range(5):
        events = ask_stream(server, temperature=1.5, seed=seed, max_tokens=100, return_token_ids=True)
        tokens = [i for e in events[:-1] for choice in e["choices"] for i in choice.get("token_ids", [])]
        assert joined(events) == server.loaded.tokenizer.decode(tokens)


def test_23_26_usage_and_the_limit(server: LiveServer) -> None:
    answer = ask(server, max_tokens=7, max_completion_tokens=5)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["prompt_tokens"] == len(ask(server, return_token_ids=True)["prompt_token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stop_token_ends_the_answer_and_counts(server: LiveServer) -> None:
    ids = ask(server, return_token_ids=True)["choices"][0]["token_ids"]
    answer = ask(server, return_token_ids=True, stop_token_ids=[ids[5]])
    end = ids.index(ids[5]) + 1
    assert answer["choices"][0]["token_ids"] == ids[:end]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == end


def test_27_without_a_limit_the_answer_may_fill_the_context(server: LiveServer) -> None:
    answer = ask(server, max_tokens=None, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


def test_29_extra_fields_reach_the_user_of_the_official_client(server: LiveServer) -> None:
    answer = server.openai().chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=3, extra_body={"return_token_ids": True, "top_k": 1}
    )
    assert len(answer.choices[0].token_ids) == 3
    assert answer.prompt_token_ids == ask(server, return_token_ids=True)["prompt_token_ids"]


def test_30_null_equals_absent(server: LiveServer) -> None:
    names = [
        "stop",
        "logit_bias",
        "logprobs",
        "n",
        "seed",
        "stream",
        "stream_options",
        "top_logprobs",
        "top_p",
        "model",
    ]
    assert text_of(ask(server, **dict.fromkeys(names))) == text_of(ask(server))


def test_30_none_from_the_official_client_equals_absent(server: LiveServer) -> None:
    names = ["stop", "logit_bias", "logprobs", "max_tokens", "n", "seed", "stream", "temperature", "top_p"]
    server.openai().chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_completion_tokens=2, **dict.fromkeys(names)
    )


def test_31_chat_template_kwargs_reach_the_template(server: LiveServer) -> None:
    def prompt(**kwargs: Any) -> str:
        ids = ask(server, return_token_ids=True, max_tokens=1, **kwargs)["prompt_token_ids"]
        return server.loaded.tokenizer.decode(ids, skip_special_tokens=False)

    assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert prompt().endswith("<|im_start|>assistant\n")


def test_36_37_parts_are_joined_and_developer_is_system(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one = ask(server, messages=[{"role": "developer", "content": parts}, MESSAGES[0]], return_token_ids=True)
    other = ask(server, messages=[{"role": "system", "content": "ab"}, MESSAGES[0]], return_token_ids=True)
    assert one["prompt_token_ids"] == other["prompt_token_ids"]


def test_44_fields_without_effect_are_accepted(server: LiveServer) -> None:
    names = ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity"]
    names += ["prompt_cache_retention", "prediction", "moderation"]
    assert text_of(ask(server, **dict.fromkeys(names, "x"))) == text_of(ask(server))


def test_46_temperature_zero_and_nearly_zero_are_greedy(server: LiveServer) -> None:
    texts = {text_of(ask(server, temperature=t)) for t in (0, 0.0, 1e-12, 1e-5)}
    assert texts == {text_of(ask(server, temperature=1.0, top_k=1))}


def test_a_seed_gives_the_same_answer_alone_and_beside_others(server: LiveServer) -> None:
    alone = text_of(ask(server, temperature=1.0, seed=7))
    with ThreadPoolExecutor(8) as pool:
        seeded = pool.submit(ask, server, temperature=1.0, seed=7)
        others = [pool.submit(ask, server, temperature=1.0) for _ in range(7)]
        assert text_of(seeded.result()) == alone
        assert len({text_of(other.result()) for other in others}) > 1


def test_sixteen_requests_at_once_get_their_serial_answers(server: LiveServer) -> None:
    def answer(number: int) -> str:
        messages = [{"role": "user", "content": f"{number} " * (1 + 3 * number)}]
        if number % 2:
            return joined(ask_stream(server, messages=messages, max_tokens=40))
        return text_of(ask(server, messages=messages, max_tokens=40))

    serial = [answer(number) for number in range(16)]
    assert len(set(serial)) == 16
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(answer, range(16))) == serial
