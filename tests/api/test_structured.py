"""Structured output over HTTP: whatever a random model would say, its answers are valid, in every form and route."""

from __future__ import annotations

import itertools
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.api.live_server import MESSAGES, LiveServer, frames, run_server
from tests.test_structured import POINT, SCHEMAS, judge

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}},
    TEXT: {"prompt": "the weather"},
}
SOME = {"max_tokens": 300, "seed": 3}
BOUNDED = ["object", "enum", "recursion", "any of", "integer bounds", "pattern", "string length"]


def texts(server: LiveServer, path: str, **fields: Any) -> list[str]:
    """The texts of the choices, all of which must be complete."""
    response = server.post(path, BODIES[path] | SOME | fields)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * len(choices)
    return [choice["text"] if path == TEXT else choice["message"]["content"] for choice in choices]


def refused(server: LiveServer, path: str, **fields: Any) -> tuple[str, str]:
    """(param, message) of the error."""
    response = server.post(path, BODIES[path] | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", BOUNDED)
def test_an_answer_is_valid_by_its_schema(server: LiveServer, path: str, name: str) -> None:
    schema = SCHEMAS[name][0]
    for temperature in (0, 1):
        (text,) = texts(server, path, response_format=schema_format(schema, strict=True), temperature=temperature)
        judge(schema).validate(json.loads(text))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"guided_json": POINT}, lambda text: judge(POINT).is_valid(json.loads(text))),
        ({"guided_json": json.dumps(POINT)}, lambda text: judge(POINT).is_valid(json.loads(text))),
        ({"structured_outputs": {"json": POINT}}, lambda text: judge(POINT).is_valid(json.loads(text))),
        ({"guided_regex": r"[a-f]{3}[0-9]"}, re.compile(r"[a-f]{3}[0-9]").fullmatch),
        ({"structured_outputs": {"regex": r"[a-f]{3}[0-9]"}}, re.compile(r"[a-f]{3}[0-9]").fullmatch),
        ({"guided_choice": ["yes", "日本"]}, ["yes", "日本"].__contains__),
        ({"structured_outputs": {"choice": ["yes", "日本"]}}, ["yes", "日本"].__contains__),
        ({"guided_grammar": 'start: ("ab" | "c") "!"'}, ["ab!", "c!"].__contains__),
        ({"guided_grammar": 'root ::= ("ab" | "c") "!"'}, ["ab!", "c!"].__contains__),
        ({"structured_outputs": {"grammar": 'start: "ab!"'}}, ["ab!"].__contains__),
    ],
)
def test_every_field_holds_all_choices_to_its_form(
    server: LiveServer, path: str, fields: dict[str, Any], holds: Any
) -> None:
    answers = texts(server, path, n=3, **fields)
    assert len(answers) == 3
    assert all(holds(text) for text in answers)


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_a_json_object_is_an_object_or_is_cut(server: LiveServer, fields: dict[str, Any]) -> None:
    """A random model seldom closes what it opened."""
    for path in BODIES:
        choice = server.post(path, BODIES[path] | SOME | fields).json()["choices"][0]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def test_text_is_not_held_to_anything(server: LiveServer) -> None:
    for path in BODIES:
        plain, asked = (
            server.post(path, BODIES[path] | {"max_tokens": 8, "temperature": 0} | fields).json()["choices"]
            for fields in ({}, {"response_format": {"type": "text"}, "guided_json": None})
        )
        assert plain == asked


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_gives_the_same_text(server: LiveServer, path: str) -> None:
    fields = SOME | {"response_format": schema_format(POINT), "n": 2}
    whole = texts(server, path, **fields)
    pieces = ["", ""]
    for chunk in frames(server.post(path, BODIES[path] | fields | {"stream": True}))[:-1]:
        for choice in chunk["choices"]:
            pieces[choice["index"]] += choice["text"] if path == TEXT else choice["delta"].get("content", "")
    assert pieces == whole


def test_max_tokens_cuts_and_says_so(server: LiveServer) -> None:
    for path in BODIES:
        body = BODIES[path] | {"response_format": schema_format(POINT), "max_tokens": 2}
        assert server.post(path, body).json()["choices"][0]["finish_reason"] == "length"


def test_every_prompt_of_many_has_its_own_state(server: LiveServer) -> None:
    body = {"prompt": ["the", "weather", "in Paris"], "guided_choice": ["first answer", "second answer"], "n": 2}
    choices = server.post(TEXT, body | SOME).json()["choices"]
    assert len(choices) == 6
    assert {choice["text"] for choice in choices} <= {"first answer", "second answer"}


def test_the_form_begins_after_the_reasoning(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "thinking_budget": 5, "response_format": schema_format(POINT), "n": 8} | SOME
    messages = [choice["message"] for choice in server.post(CHAT, body).json()["choices"]]
    for message in messages:
        judge(POINT).validate(json.loads(message["content"]))
    assert any("reasoning_content" in message for message in messages), "none has thought; try another seed"


def test_the_responses_route_has_it_as_text_format(server: LiveServer) -> None:
    form = {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}
    body = {"input": "a point", "chat_template_kwargs": {"enable_thinking": False}, "max_output_tokens": 300, "seed": 1}
    answer = server.post("/v1/responses", body | {"text": {"format": form}}).json()
    (message,) = (item for item in answer["output"] if item["type"] == "message")
    judge(POINT).validate(json.loads(message["content"][0]["text"]))
    bad = server.post("/v1/responses", body | {"text": {"format": form | {"schema": {"not": {}}}}})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "text.format.schema"


class Step(BaseModel):
    kind: Literal["add", "remove"]
    count: int = Field(ge=0, le=99)


class Plan(BaseModel):
    title: str = Field(max_length=8)
    steps: list[Step] = Field(max_length=2)
    parent: Plan | None


def test_the_client_parses_into_a_pydantic_model(server: LiveServer) -> None:
    parse = server.openai().chat.completions.parse
    options: Any = {"model": "tiny", "messages": MESSAGES, "response_format": Plan, "seed": 2}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    plan = parse(**options, max_tokens=400).choices[0].message.parsed
    assert isinstance(plan, Plan)
    with pytest.raises(openai.LengthFinishReasonError):
        parse(**options, max_tokens=3)


def test_only_one_form_may_be_given(server: LiveServer) -> None:
    given: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
        "guided_json": POINT,
        "guided_regex": "a",
        "guided_choice": ["a"],
        "guided_grammar": 'start: "a"',
    }
    for path in BODIES:
        for first, second in itertools.combinations(given, 2):
            param, message = refused(server, path, **{first: given[first], second: given[second]})
            assert param.split(".")[0] == second
            assert "cannot be used with" in message
        param, message = refused(server, path, structured_outputs={"regex": "a", "choice": ["a"]})
        assert param == "structured_outputs.choice"


def test_what_it_cannot_be_used_with(server: LiveServer) -> None:
    for path in BODIES:
        assert refused(server, path, guided_regex="a", use_beam_search=True) == (
            "guided_regex",
            "guided_regex cannot be used with use_beam_search",
        )


def test_a_refusal_says_which_part_of_the_schema(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    for path in BODIES:
        param, message = refused(server, path, response_format=schema_format(schema))
        assert param == "response_format.json_schema.schema"
        assert message == f"{param}: the schema's keyword 'uniqueItems' is not supported (at properties.tags)"


DEAD_END = "start: /[0-9]{40}/ never\nnever: never"


def is_dead_end(error: Any, param: str) -> bool:
    return (
        (error["type"], error["code"], error["param"]) == ("invalid_request_error", "dead_end", param)
        and error["message"].startswith(f"{param} led the answer to a dead end (no text can satisfy it); change it")
    )  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
def test_a_form_that_leads_nowhere_is_the_fault_of_the_request_and_says_so(
    server: LiveServer, path: str, n: int
) -> None:
    for fields, param in (
        ({"guided_grammar": DEAD_END}, "guided_grammar"),
        ({"structured_outputs": {"grammar": DEAD_END}}, "structured_outputs.grammar"),
    ):
        body = BODIES[path] | SOME | fields | {"n": n}
        response = server.post(path, body)
        assert response.status_code == 400
        assert is_dead_end(response.json()["error"], param)
        *before, last = frames(server.post(path, body | {"stream": True}))
        assert is_dead_end(last["error"], param), "the last event, and no [DONE] behind it"
        assert all(choice["finish_reason"] is None for event in before for choice in event["choices"])
        assert any(choice.get("text") or choice.get("delta", {}).get("content") for choice in before[-1]["choices"])


def test_the_official_client_does_not_try_a_dead_end_again(server: LiveServer) -> None:
    statuses: list[int] = []
    with httpx.Client(event_hooks={"response": [lambda response: statuses.append(response.status_code)]}) as http:
        create = server.openai(max_retries=2, http_client=http).chat.completions.create
        options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100}
        options["extra_body"] = {"guided_grammar": DEAD_END, "chat_template_kwargs": {"enable_thinking": False}}
        with pytest.raises(openai.BadRequestError, match="dead end") as caught:
            create(**options)
        with pytest.raises(openai.APIError, match="dead end") as in_stream:
            list(create(**options, stream=True))
    assert statuses == [400, 200]
    assert (caught.value.code, caught.value.param) == ("dead_end", "guided_grammar")
    assert (in_stream.value.code, in_stream.value.param) == ("dead_end", "guided_grammar")


def test_a_response_at_a_dead_end_names_its_own_field(server: LiveServer) -> None:
    """A reference to itself can be followed for ever and holds nothing; its place is reached after a while only."""
    itself = {"$ref": "#/$defs/itself"}
    first = {"type": "string", "minLength": 40, "maxLength": 40}
    schema = {"type": "object", "properties": {"a": first, "b": itself}, "required": ["a", "b"]}
    schema |= {"$defs": {"itself": itself}}
    body = {"input": "a point", "chat_template_kwargs": {"enable_thinking": False}, "max_output_tokens": 300}
    body |= {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
    plain = server.post("/v1/responses", body)
    assert plain.status_code == 400
    assert is_dead_end(plain.json()["error"], "text.format.schema")
    stream = server.openai().responses.create(model="tiny", input="", stream=True, extra_body=body)
    events: list[Any] = []
    with pytest.raises(openai.APIError, match="dead end") as caught:
        events.extend(stream)
    assert (caught.value.code, caught.value.param) == ("dead_end", "text.format.schema")
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "invalid_prompt"
    assert events[-1].response.error.message.startswith("text.format.schema led the answer to a dead end")


def test_an_answer_at_a_dead_end_hurts_no_other(server: LiveServer) -> None:
    alone = server.post(TEXT, BODIES[TEXT] | SOME | {"ignore_eos": True}).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(server.post, TEXT, BODIES[TEXT] | SOME | {"ignore_eos": True}) for _ in range(2)]
        dead = [pool.submit(server.post, TEXT, BODIES[TEXT] | SOME | {"guided_grammar": DEAD_END}) for _ in range(2)]
        assert [future.result().status_code for future in dead] == [400, 400]
        assert [future.result().json()["choices"][0]["text"] for future in others] == [alone] * 2
    assert server.worker.stats.num_live_pages == 0
    assert texts(server, TEXT, guided_choice=["still here"]) == ["still here"]


def test_bad_words_that_leave_no_token_are_a_dead_end_too(server: LiveServer) -> None:
    (first, *_) = ids = server.loaded.tokenizer.encode("ab")
    word = server.loaded.tokenizer.decode([first])
    response = server.post(TEXT, BODIES[TEXT] | {"allowed_token_ids": [first], "bad_words": [word]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("dead_end", "bad_words")
    assert error["message"].startswith("bad_words forbids every token that could come next")
    body = BODIES[TEXT] | {"allowed_token_ids": ids, "bad_words": [word], "max_tokens": 3}
    assert server.post(TEXT, body).status_code == 200, "one is left"


def test_without_the_library_it_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with run_server(model_folder) as server:
        param, message = refused(server, CHAT, response_format={"type": "json_object"})
        assert param == "response_format"
        assert message == "response_format needs `pip install 'cupyllm[structured]'`"
        assert server.post(CHAT, BODIES[CHAT] | {"max_tokens": 1}).status_code == 200
