"""/v1/completions. Numbers in names are those of the HTTP contract's statements."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from cupyllm import LLM, SamplingParams
from tests.api.live_server import MAX_MODEL_LEN, MODEL_NAME, LiveServer, frames

PATH = "/v1/completions"
PROMPT = "the weather in"


def complete(server: LiveServer, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def complete_stream(server: LiveServer, **fields: Any) -> list[Any]:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "stream": True} | fields
    return frames(server.post(PATH, body))


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_47_four_forms_of_a_prompt(server: LiveServer) -> None:
    ids = server.loaded.tokenizer.encode(PROMPT)
    expected = texts(complete(server))
    assert texts(complete(server, prompt=[PROMPT])) == expected
    assert texts(complete(server, prompt=ids)) == expected
    assert texts(complete(server, prompt=[ids])) == expected


def test_48_many_prompts_give_as_many_choices_in_order(server: LiveServer) -> None:
    prompts = [PROMPT, "system user", "a", "1 2 3"]
    one_by_one = [complete(server, prompt=prompt) for prompt in prompts]
    together = complete(server, prompt=prompts)
    assert texts(together) == [texts(answer)[0] for answer in one_by_one]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][count] == sum(answer["usage"][count] for answer in one_by_one)


def test_48_streamed_choices_carry_their_index(server: LiveServer) -> None:
    prompts = [PROMPT, "system user", "a"]
    pieces: dict[int, str] = defaultdict(str)
    reasons = []
    for event in complete_stream(server, prompt=prompts)[:-1]:
        (choice,) = event["choices"]
        assert choice["index"] not in [index for index, _ in reasons], "nothing may follow a finish reason"
        pieces[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            reasons.append((choice["index"], choice["finish_reason"]))
    assert [pieces[index] for index in range(3)] == texts(complete(server, prompt=prompts))
    assert sorted(reasons) == [(0, "length"), (1, "length"), (2, "length")]


def test_a_stop_string_ends_one_choice_and_not_the_others(server: LiveServer) -> None:
    prompts = [PROMPT, "system user"]
    first, second = texts(complete(server, prompt=prompts))
    stop = next(first[i : i + 2] for i in range(len(first)) if first[i : i + 2] not in second)
    answer = complete(server, prompt=prompts, stop=stop)
    assert texts(answer) == [first[: first.index(stop)], second]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]


def test_49_56_objects_and_finish_reasons(server: LiveServer) -> None:
    answer = complete(server)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    *events, usage, done = complete_stream(server, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"text_completion"}
    assert (usage["choices"], usage["usage"]) == ([], answer["usage"])


def test_streamed_and_plain_text_equal_that_of_llm(server: LiveServer, model_folder: Path) -> None:
    llm = LLM(str(model_folder), max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.02)
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].text
    assert texts(complete(server, max_tokens=40)) == [expected]
    events = complete_stream(server, max_tokens=40)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected


def test_return_token_ids_adds_those_of_prompt_and_output(server: LiveServer) -> None:
    (choice,) = complete(server, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == server.loaded.tokenizer.encode(PROMPT)
    assert server.loaded.tokenizer.decode(choice["token_ids"]) == choice["text"]
    events = complete_stream(server, return_token_ids=True)[:-1]
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == choice["token_ids"]
    assert ["prompt_token_ids" in event["choices"][0] for event in events] == [True] + [False] * (len(events) - 1)


def test_27_without_a_limit_there_are_16_tokens(server: LiveServer) -> None:
    assert complete(server, max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_leaves_room_for_one_token_gets_one(server: LiveServer, stream: bool) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 1)
    if stream:
        *_, usage, _ = complete_stream(server, prompt=prompt, max_tokens=None, stream_options={"include_usage": True})
    else:
        usage = complete(server, prompt=prompt, max_tokens=None)
    assert usage["usage"]["completion_tokens"] == 1


def test_control_tokens_in_a_raw_prompt_are_control_tokens(server: LiveServer) -> None:
    (choice,) = complete(server, prompt="<|im_start|>user", return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"][0] == server.loaded.tokenizer.added_tokens["<|im_start|>"]


def test_the_official_client_completes(server: LiveServer) -> None:
    client = server.openai()
    plain = client.completions.create(model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=12)
    stream = client.completions.create(model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
