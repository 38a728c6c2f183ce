"""Structured output over HTTP: whatever a random model would say, its answers are valid, in every form and route."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

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


def test_a_form_that_leads_nowhere_fails_alone(server: LiveServer) -> None:
    grammar = "start: /[0-9]{40}/ never\nnever: never"
    response = server.post(TEXT, BODIES[TEXT] | SOME | {"guided_grammar": grammar})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert texts(server, TEXT, guided_choice=["still here"]) == ["still here"]


def test_without_the_library_it_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with run_server(model_folder) as server:
        param, message = refused(server, CHAT, response_format={"type": "json_object"})
        assert param == "response_format"
        assert message == "response_format needs `pip install 'cupyllm[structured]'`"
        assert server.post(CHAT, BODIES[CHAT] | {"max_tokens": 1}).status_code == 200
