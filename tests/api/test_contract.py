"""The statements of the HTTP contract (the OpenAI API as its clients see it) that no other test is about, by number.

Tests of a statement have its number in their name, wherever they are: `test_18_...`, `test_08_09_10_...`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, frames
from tests.api.scripted import Actor

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STATEMENTS = {*(f"{number:02}" for number in range(1, 77)), "63b"}


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


def refused(server: LiveServer, path: str, **fields: Any) -> str | None:
    """The `param` of a refusal."""
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
    response = server.post(path, base | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    param: str | None = response.json()["error"]["param"]
    return param


def taken(server: LiveServer, path: str, **fields: Any) -> Any:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
    response = server.post(path, {"max_tokens": 2, "temperature": 0} | base | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_every_statement_has_a_test() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    numbers = {number for name in re.findall(r"def test_((?:\d\db?_)+)", source) for number in name.split("_")}
    assert STATEMENTS - numbers == set()


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r", "\u2028", "\u0085", "data: [DONE]\n\n", "\x1e"])
def test_03_line_ends_in_a_text_do_not_end_events(actor: Actor, end: str) -> None:
    """Clients take CR, LF and CRLF for line ends, some of them U+2028 and U+0085 too."""
    text = f"the weather{end}is fine"
    actor.tell(text)
    create = actor.server.openai().chat.completions.create
    chunks = create(model=MODEL_NAME, messages=MESSAGES, max_tokens=50, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_16_every_choice_of_a_stream_has_its_role_and_its_end(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "n": 3, "stream": True, "ignore_eos": True}
    choices = [chunk["choices"][0] for chunk in frames(server.post(CHAT, body))[:-1]]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"].get("role") for choice in own[1:]] == [None] * (len(own) - 1)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_25_bytes_are_numbers_and_no_logprob_is_below_the_floor(server: LiveServer) -> None:
    content = taken(server, CHAT, logprobs=True, top_logprobs=20, max_tokens=8)["choices"][0]["logprobs"]["content"]
    entries = [entry for place in content for entry in (place, *place["top_logprobs"])]
    assert len(entries) == 8 * 21
    for entry in entries:
        assert all(0 <= byte <= 255 for byte in entry["bytes"])
        assert -9999.0 <= entry["logprob"] <= 0


def test_32_stop_is_a_string_or_up_to_four(server: LiveServer) -> None:
    for path in (CHAT, TEXT):
        for good in ("x", ["x"], ["a", "b", "c", "d"], [], None):
            taken(server, path, stop=good)
        for bad in (["a", "b", "c", "d", "e"], "", [""], 5, [5], {"a": "b"}):
            assert str(refused(server, path, stop=bad)).startswith("stop")


def test_33_keys_of_logit_bias_are_token_ids_and_values_from_minus_100_to_100(server: LiveServer) -> None:
    for path in (CHAT, TEXT):
        for good in ({"5": 100}, {"5": -100, "6": 0.5}, {}, None):
            taken(server, path, logit_bias=good)
        for bad in ({"5": 100.5}, {"5": -101}, {"abc": 1}, {"-1": 1}, {"99999999": 1}, {"5": "1"}, {"5": True}, [5]):
            assert str(refused(server, path, logit_bias=bad)).startswith("logit_bias")


def test_35_53_logprobs_is_a_number_in_completions_and_the_chosen_token_is_always_there(server: LiveServer) -> None:
    """OpenAI's limit is 5; up to 20 are served, as vLLM does."""
    for count in (0, 5, 20):
        (choice,) = taken(server, TEXT, logprobs=count, temperature=1.0, seed=3, max_tokens=6)["choices"]
        for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
            assert token in top
            assert count <= len(top) <= count + 1 or count == 0
    for bad in (21, -1, "5", True, 1.5):
        assert refused(server, TEXT, logprobs=bad) == "logprobs"


def test_34_top_logprobs_need_logprobs(server: LiveServer) -> None:
    assert refused(server, CHAT, top_logprobs=5) == "top_logprobs"
    assert refused(server, CHAT, top_logprobs=5, logprobs=False) == "top_logprobs"
    assert refused(server, CHAT, top_logprobs=21, logprobs=True) == "top_logprobs"
    assert refused(server, CHAT, logprobs=5) == "logprobs"


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        {},
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x" * 65, "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}},
    ],
)
def test_40_a_response_format_of_another_shape_is_refused(server: LiveServer, wrong: Any) -> None:
    assert str(refused(server, CHAT, response_format=wrong)).startswith("response_format")


def test_40_the_three_response_formats_are_taken(server: LiveServer) -> None:
    named = {"name": "x" * 64, "schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    taken(server, CHAT, response_format={"type": "text"})
    taken(server, CHAT, response_format={"type": "json_object"})
    answer = taken(server, CHAT, response_format={"type": "json_schema", "json_schema": named}, max_tokens=20)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {}


def test_41_parse_gives_an_object_and_raises_when_the_answer_was_cut_off(actor: Actor) -> None:
    parse = actor.server.openai().chat.completions.parse
    actor.tell('{"city": "Paris", "degrees": 21}')
    asked: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 0, "response_format": Weather}
    assert parse(**asked).choices[0].message.parsed == Weather(city="Paris", degrees=21)
    actor.tell('{"city": "Paris", "degrees": 21}')
    with pytest.raises(openai.LengthFinishReasonError):
        parse(**asked, max_tokens=3)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_45_ranges(server: LiveServer, path: str) -> None:
    ranges: dict[str, tuple[list[Any], list[Any]]] = {
        "temperature": ([0, 2], [-0.01, 2.01]),
        "top_p": ([0.001, 1], [0, 1.001, -1]),
        "presence_penalty": ([-2, 2], [-2.01, 2.01]),
        "frequency_penalty": ([-2, 2], [-2.01, 2.01]),
        "n": ([1, 16], [0, -1, 17]),
    }
    for name, (good, bad) in ranges.items():
        for value in good:
            taken(server, path, **{"temperature": 1} | {name: value})
        for value in bad:
            assert refused(server, path, **{name: value}) == name


def test_58_codes_are_words(server: LiveServer) -> None:
    answers = [
        server.post(CHAT, {"messages": MESSAGES, "model": "nope"}),
        server.post(TEXT, {"prompt": [5] * 600}),
        server.post(TEXT, {"prompt": 5}),
        server.get("/nope"),
    ]
    codes = [answer.json()["error"]["code"] for answer in answers]
    assert codes == ["model_not_found", "context_length_exceeded", None, None]
