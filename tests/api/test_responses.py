"""/v1/responses. Numbers in names are those of the HTTP contract's statements."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types import responses as sdk
from pydantic import BaseModel, TypeAdapter

from cupyllm.api.protocol.responses import ResponsesRequest
from cupyllm.api.response_writer import ResponseWriter
from cupyllm.message_parts import CallArguments, CallBegin, CallEnd, ContentText, MessagePart, ReasoningText
from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, wait_until
from tests.api.scripted import Actor
from tests.api.test_bad_bodies import assert_error

PATH = "/v1/responses"
QUESTION = MESSAGES[0]["content"]
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
Json = dict[str, Any]
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(sdk.ResponseStreamEvent)


def ask(server: LiveServer, **fields: Any) -> Json:
    response = server.post(PATH, {"input": QUESTION, "temperature": 0, "max_output_tokens": 24} | fields)
    assert response.status_code == 200, response.text
    sdk.Response.model_validate(response.json(), strict=False)
    return response.json()


def events_of(response: httpx.Response) -> list[Json]:
    """The events of a stream, each as described by the server and by OpenAI's types."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *texts, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for text in texts:
        name, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        response.extensions["description"].check_event(event, PATH)
        SDK_EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def ask_stream(server: LiveServer, **fields: Any) -> list[Json]:
    body = {"input": QUESTION, "temperature": 0, "max_output_tokens": 24, "stream": True}
    return events_of(server.post(PATH, body | fields))


def text_of(response: Json) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def chat_text(server: LiveServer, **fields: Any) -> str:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24} | fields
    return server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]


def without_ids(value: Any) -> Any:
    """A JSON value without what is different in every response."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at")}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


def test_71_72_shape_of_a_response(server: LiveServer) -> None:
    response = ask(server)
    assert {"id", "created_at", "object", "model", "output", "parallel_tool_calls", "tool_choice"} <= set(response)
    assert (response["object"], response["model"], response["tools"]) == ("response", MODEL_NAME, [])
    (message,) = response["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert text_of(response) == chat_text(server)
    usage = response["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["output_tokens"] == 24
    assert usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_72_cached_tokens_are_counted(server: LiveServer) -> None:
    asked = {"input": "cached " * 40, "max_output_tokens": 1, "cache_salt": "of this test"}
    assert ask(server, **asked)["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert ask(server, **asked)["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_73_events_in_order(server: LiveServer) -> None:
    events = ask_stream(server)
    types = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert len(deltas) > 2
    assert all(deltas)
    final = events[-1]["response"]
    assert "".join(deltas) == events[-4]["text"] == text_of(final) == chat_text(server)
    assert events[0]["response"] == events[1]["response"]
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["id"] == events[-2]["item"]["id"] == final["output"][0]["id"]


def test_73_an_answer_that_ends_by_itself_is_completed(server: LiveServer) -> None:
    stop = chat_text(server)[10:14]
    events = ask_stream(server, stop=stop)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["status"] == "completed"
    assert events[-1]["response"]["incomplete_details"] is None
    assert events[-2]["item"]["status"] == "completed"
    plain = ask(server, stop=stop)
    assert without_ids(plain) == without_ids(events[-1]["response"]) | {"usage": plain["usage"]}


def test_75_an_answer_that_was_cut_off_is_incomplete(server: LiveServer) -> None:
    for response in (ask(server), ask_stream(server)[-1]["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"


PARTS: list[MessagePart] = [
    *(ReasoningText("I "), ReasoningText("see.")),
    *(ContentText("Let me "), ContentText("ask.")),
    *(
        CallBegin(0, "call_a", "f"),
        CallArguments(0, '{"x":'),
        CallArguments(0, ""),
        CallArguments(0, " 1}"),
        CallEnd(0),
    ),
    *(CallBegin(1, "call_b", "g"), CallArguments(1, "{}"), CallEnd(1)),
    ContentText("So."),
]
HEAD = {"id": "resp_1", "object": "response", "error": None, "incomplete_details": None}


def written(parts: list[MessagePart], finish_reason: str = "stop") -> tuple[list[Json], Json]:
    writer = ResponseWriter(HEAD)
    events = [*writer.begin(), *writer.add(parts), *writer.finish(finish_reason, {})]
    return events, writer.response


def test_73_items_of_all_kinds_follow_each_other() -> None:
    _, response = written(PARTS)
    assert [item["type"] for item in response["output"]] == [
        *("reasoning", "message", "function_call", "function_call", "message")
    ]
    reasoning, message, call, other, last = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I see."}]
    assert message["content"][0]["text"] == "Let me ask."
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_a", "f", '{"x": 1}')
    assert (other["call_id"], other["name"], other["arguments"]) == ("call_b", "g", "{}")
    assert last["content"][0]["text"] == "So."
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert len({item["id"] for item in response["output"]}) == 5


def test_73_every_item_is_announced_grows_and_is_closed() -> None:
    events, response = written(PARTS)
    body = events[2:-1]
    for index, item in enumerate(response["output"]):
        of_item = [event for event in body if event["output_index"] == index]
        assert body[: len(of_item)] == of_item, "items must not mix"
        body = body[len(of_item) :]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[0]["item"]["status"] == "in_progress"
        assert of_item[-1] == of_item[-1] | {"type": "response.output_item.done", "item": item}
        deltas = "".join(event.get("delta", "") for event in of_item)
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert all(event["item_id"] == item["id"] for event in of_item[1:-1])
    assert body == []


@pytest.mark.parametrize("length", range(len(PARTS) + 1))
def test_73_every_way_to_be_cut_off_is_a_sound_stream_for_the_sdk(length: int) -> None:
    events, response = written(PARTS[:length], "length")
    assert events[-1] == events[-1] | {"type": "response.incomplete", "response": response}
    assert [item["status"] for item in response["output"][:-1]] == ["completed"] * (len(response["output"]) - 1)
    for event in events[2:-1]:
        SDK_EVENT.validate_python(event)


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    _, response = written([])
    assert [part["text"] for item in response["output"] for part in item["content"]] == [""]


def test_a_failure_ends_the_stream_with_what_was_written() -> None:
    writer = ResponseWriter(HEAD)
    events = [*writer.begin(), *writer.add(PARTS[:3]), *writer.fail("it broke")]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert [item["status"] for item in events[-1]["response"]["output"]] == ["completed", "incomplete"]


# Tools and reasoning. A small random model does neither, so its tokens are forced.

CALLS = '<tool_call>\n{"name": "f", "arguments": {"x": "\U0001fae0"}}\n</tool_call>\n' + (
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nA question.\n</think>\n\n"
KINDS_OF_ITEMS = {
    THOUGHT + "Let me see.\n" + CALLS: ["reasoning", "message", "function_call", "function_call"],
    CALLS: ["function_call", "function_call"],
    THOUGHT + "It is.": ["reasoning", "message"],
    "<tool_call>\nno": ["message"],
}


@pytest.mark.parametrize("text", KINDS_OF_ITEMS)
def test_73_streamed_and_plain_responses_are_the_same(actor: Actor, text: str) -> None:
    answers = []
    for stream in (False, True):
        actor.tell(text)
        asked = {"tools": [{"type": "web_search"}, TOOL], "max_output_tokens": 200}
        answers.append(ask_stream(actor.server, **asked) if stream else ask(actor.server, **asked))
    plain, events = answers
    final = events[-1]["response"]
    assert [item["type"] for item in plain["output"]] == KINDS_OF_ITEMS[text]
    assert (plain["status"], plain["tools"]) == ("completed", [TOOL])
    assert without_ids(plain) == without_ids(final) | {"usage": plain["usage"]}
    assert (plain["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == text.startswith("<think>")
    calls = [item for item in plain["output"] if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == (['{"x": "\U0001fae0"}', "{}"] if calls else [])


def test_73_a_call_that_was_cut_off_is_incomplete(actor: Actor) -> None:
    actor.tell(CALLS)
    events = ask_stream(actor.server, tools=[TOOL], max_output_tokens=30)
    call = events[-1]["response"]["output"][0]
    assert (events[-1]["type"], call["status"]) == ("response.incomplete", "incomplete")
    assert '{"x": "\U0001fae0"}'.startswith(call["arguments"])


def test_parallel_calls_can_be_forbidden(actor: Actor) -> None:
    actor.tell(CALLS)
    response = ask(actor.server, tools=[TOOL], max_output_tokens=200, parallel_tool_calls=False)
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert response["status"] == "completed"


def test_no_tool_may_be_called_where_none_is_chosen_or_allowed(actor: Actor) -> None:
    for choice in ("none", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}):
        actor.tell(CALLS)
        response = ask(actor.server, tools=[TOOL], max_output_tokens=200, tool_choice=choice)
        assert text_of(response) == CALLS


def test_the_official_client_streams_calls(actor: Actor) -> None:
    actor.tell(THOUGHT + CALLS)
    with actor.server.openai().responses.stream(model=MODEL_NAME, input="a", temperature=0, tools=[TOOL]) as stream:
        deltas = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        reasoning, first, second = stream.get_final_response().output
    assert reasoning.content[0].text == "A question."
    assert [json.loads(call.arguments) for call in (first, second)] == [{"x": "\U0001fae0"}, {}]
    assert {event.output_index: event.snapshot for event in deltas} == {1: first.arguments, 2: second.arguments}


def test_reasoning_effort_reaches_the_template(server: LiveServer) -> None:
    fields: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    response = ask(server, reasoning={"effort": "none", "summary": "auto"})
    assert response["reasoning"] == {"effort": "none", "summary": None}
    assert text_of(response) == chat_text(server, **fields) == text_of(ask(server, **fields))


# Log-probabilities and the form of the answer.


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_logprobs_are_those_of_the_chat_route(server: LiveServer, fields: Json) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, "logprobs": True}
    body |= {key: value for key, value in fields.items() if key == "top_logprobs"}
    expected = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    plain, events = ask(server, **fields), ask_stream(server, **fields)
    for response in (plain, events[-1]["response"]):
        assert response["output"][0]["content"][0]["logprobs"] == expected
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == expected
    for event in deltas:
        assert "".join(one["token"] for one in event["logprobs"]) == event["delta"] or "\ufffd" in str(event)


def test_logprobs_are_not_given_unasked_and_only_for_messages(actor: Actor) -> None:
    assert ask(actor.server, max_output_tokens=1)["output"][0]["content"][0]["logprobs"] == []
    actor.tell(THOUGHT + "So.")
    reasoning, message = ask(actor.server, max_output_tokens=200, top_logprobs=1)["output"]
    assert "logprobs" not in reasoning["content"][0]
    tokens = [one["token"] for one in message["content"][0]["logprobs"]]
    assert "".join(tokens).endswith("So.<|im_end|>")
    assert "question" not in "".join(tokens)


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    is_mild: bool


def test_the_official_client_parses_structured_output(server: LiveServer) -> None:
    client = server.openai()
    asked: Any = {"model": MODEL_NAME, "input": QUESTION, "temperature": 0, "text_format": Weather}
    parsed = client.responses.parse(**asked).output_parsed
    assert isinstance(parsed, Weather)
    with client.responses.stream(**asked) as stream:
        (done,) = [event for event in stream if event.type == "response.output_text.done"]
        assert done.parsed == stream.get_final_response().output_parsed == parsed


def test_structured_output_is_that_of_the_chat_route(server: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"enum": ["a", "b"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    chat_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    own_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    response = ask(server, text={"format": own_format, "verbosity": "low"}, max_output_tokens=100)
    assert json.loads(text_of(response))["x"] in ("a", "b")
    assert text_of(response) == chat_text(server, response_format=chat_format, max_tokens=100)
    assert response["text"] == {"format": own_format}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_tool_can_be_demanded(server: LiveServer, choice: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"enum": ["a", "b"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tool = TOOL | {"parameters": schema, "strict": True}
    response = ask(server, tools=[tool], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=100)
    (call,) = response["output"]
    assert call["name"] == "f"
    assert json.loads(call["arguments"])["x"] in ("a", "b")
    assert response["tool_choice"] == choice


# Requests.


def test_76_a_string_and_items_ask_the_same(server: LiveServer) -> None:
    expected = text_of(ask(server))
    for given in (
        [{"role": "user", "content": QUESTION}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": part} for part in (QUESTION[:9], QUESTION[9:])]}],
    ):
        assert text_of(ask(server, input=given)) == expected


def prompt_of(server: LiveServer, **fields: Any) -> int:
    return ask(server, max_output_tokens=1, **fields)["usage"]["input_tokens"]


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
HISTORIES: list[tuple[Json, list[Json]]] = [
    (
        {"instructions": "Be brief.", "input": "a"},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}],
    ),
    (
        {"input": [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}]},
        [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}],
    ),
    ({"input": [], "instructions": "a"}, [{"role": "system", "content": "a"}]),
    (
        {
            "input": [
                {"role": "user", "content": "a"},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "t"}],
                },
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
                },
                CALL | {"id": "fc_1", "status": "completed"},
                CALL | {"call_id": "c2", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "one"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            ]
        },
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "reasoning_content": "t",
                "content": "b",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                    {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
        ],
    ),
    (
        {"input": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, CALL]},
        [
            {"role": "assistant", "content": "a"},
            {
                "role": "assistant",
                "content": "b",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
        ],
    ),
    (
        {"input": [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        [{"role": "user", "content": "a"}],
    ),
]


@pytest.mark.parametrize(("fields", "messages"), HISTORIES)
def test_76_items_become_the_messages_of_a_chat(fields: Json, messages: list[Json]) -> None:
    assert ResponsesRequest.model_validate(fields).as_chat_request().body["messages"] == messages


@pytest.mark.parametrize(("fields", "messages"), HISTORIES)
def test_76_items_are_answered_as_the_messages_are(server: LiveServer, fields: Json, messages: list[Json]) -> None:
    assert text_of(ask(server, **fields)) == chat_text(server, messages=messages)


def test_an_answer_can_be_sent_back(server: LiveServer) -> None:
    first = ask(server)
    history = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "more"}]
    messages = [*MESSAGES, {"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "more"}]
    assert text_of(ask(server, input=history)) == chat_text(server, messages=messages)


def test_76_tools_that_are_no_functions_do_no_harm(server: LiveServer) -> None:
    """Codex and others always send some; they are not shown to the model, and the answer says which tools it had."""
    others = [
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "local_shell"},
        {"type": "namespace", "name": "mcp", "tools": [TOOL]},
        {"type": "image_generation", "output_format": "png"},
    ]
    response = ask(server, tools=others, tool_choice="auto", parallel_tool_calls=False)
    assert response["tools"] == []
    assert response["parallel_tool_calls"] is False
    assert text_of(response) == chat_text(server)


def test_fields_that_codex_sends_are_taken(server: LiveServer) -> None:
    body = {"client_metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
    body |= {"store": False, "reasoning": None, "tool_choice": "auto", "tools": [], "parallel_tool_calls": False}
    assert text_of(ask(server, **body, instructions=None)) == chat_text(server)


def test_sampling_is_that_of_the_chat_route(server: LiveServer) -> None:
    fields = {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1}
    response = ask(server, **fields)
    assert text_of(response) == chat_text(server, **fields)
    assert (response["temperature"], response["top_p"]) == (0.9, 0.9)


def test_what_was_asked_for_is_repeated(server: LiveServer) -> None:
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "text": {"format": {"type": "text"}}}
    response = ask(server, **fields)
    assert response == response | fields | {"max_output_tokens": 24, "store": False, "tool_choice": "auto"}


BAD: list[tuple[Json, str | None]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": ["a"]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "\ud800"}]}]}, "input[0].content"),
    ({"instructions": "a", "input": [CALL, CALL | {"arguments": "5"}]}, "input[1].arguments"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "\ud800", "output": ""}]}, "input[1].call_id"),
    ({"instructions": "\ud800"}, "instructions"),
    ({"input": "\ud800"}, "input"),
    ({"input": [{"role": "user", "content": "a", "foo": 1}]}, "input[0].foo"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c1"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "a"}] * 2049}, "input"),
    ({"input": "1 " * 600}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "input"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stream": "yes"}, "stream"),
    ({"tools": {}}, "tools"),
    ({"tools": [{}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [TOOL | {"foo": 1}]}, "tools[0].foo"),
    ({"tools": [{"type": "web_search"}, TOOL | {"name": "a b"}]}, "tools[1].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"parameters": 5}]}, "tools[0].parameters"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tool_choice": "some", "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice"),
    ({"text": {"foo": 1}}, "text.foo"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "none", "foo": 1}}, "reasoning.foo"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": "all"}, "include"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_object", "name": "a"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"thinking_budget": -1}, "thinking_budget"),
    ({"messages": MESSAGES}, None),
    ({"max_tokens": 5}, None),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_62_what_cannot_be_served_is_refused(server: LiveServer, fields: Json, param: str | None, stream: bool) -> None:
    body = json.dumps({"input": "a", "max_output_tokens": 1, "stream": stream} | fields)
    response = server.http.post(server.url + PATH, content=body, headers={"content-type": "application/json"})
    message = assert_error(response.status_code, response.json(), param=param)
    assert "chat" not in message


def test_a_previous_response_is_refused_with_what_to_do(server: LiveServer) -> None:
    response = server.post(PATH, {"input": "a", "previous_response_id": "resp_1"})
    assert "use input for what came before, since this server keeps no responses" in response.json()["error"]["message"]


def test_61_only_the_served_model_answers(server: LiveServer) -> None:
    response = server.post(PATH, {"input": "a", "model": "other"})
    assert response.status_code == 404


# The official client.


def test_the_official_client_creates(server: LiveServer) -> None:
    response = server.openai().responses.create(
        model=MODEL_NAME, input=QUESTION, temperature=0, max_output_tokens=24, store=True
    )
    assert response.output_text == chat_text(server)
    assert response.usage.output_tokens == 24
    assert response._request_id.startswith("req_")


def test_73_74_the_official_client_streams(server: LiveServer) -> None:
    stop = chat_text(server)[10:14]
    with server.openai().responses.stream(
        model=MODEL_NAME, input=QUESTION, temperature=0, extra_body={"stop": stop}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas) == chat_text(server)[:10]


def test_73_the_official_client_iterates_over_raw_events(server: LiveServer) -> None:
    stream = server.openai().responses.create(
        model=MODEL_NAME, input=QUESTION, temperature=0, max_output_tokens=24, stream=True
    )
    events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == chat_text(server)


def test_the_official_client_sees_refusals(server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().responses.create(model=MODEL_NAME, input="a", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_a_client_that_leaves_ends_its_request(server: LiveServer) -> None:
    body = {"input": QUESTION, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", server.url + PATH, json=body) as response:
        next(response.iter_bytes())
    wait_until(lambda: server.worker.num_live == 0 and server.worker.stats.num_running == 0, "the request has ended")
