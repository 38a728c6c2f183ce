"""What becomes of OpenAI chat messages, and which of them are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cupyllm.errors import RequestError
from cupyllm.messages import normalise_messages

USER = {"role": "user", "content": "hi"}


def one(**message: Any) -> dict[str, Any]:
    return normalise_messages([message])[0]


def call(arguments: object = "{}", **more: object) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}} | more


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"role": "user", "content": ""}, {"role": "user", "content": ""}),
        ({"role": "system", "content": "s", "name": "n"}, {"role": "system", "content": "s", "name": "n"}),
        ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
        (
            {"role": "user", "content": [text_part("a"), text_part(""), text_part("b")]},
            {"role": "user", "content": "ab"},
        ),
        (
            {"role": "tool", "content": "7", "tool_call_id": "call_1"},
            {"role": "tool", "content": "7", "tool_call_id": "call_1"},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
        ),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        (
            # what openai-python writes for a message of its own
            {
                **{"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None},
                **{"function_call": None, "tool_calls": None},
            },
            {"role": "assistant", "content": "a"},
        ),
        ({"role": "user", "content": "a", "anything": None}, {"role": "user", "content": "a"}),
    ],
)
def test_a37_servable_shapes_and_t11_what_the_template_gets(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert one(**given) == expected


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a37_an_assistant_message_with_tool_calls_may_have_no_content(content: dict[str, Any]) -> None:
    message = one(role="assistant", tool_calls=[call('{"a": 1}', index=0)], **content)
    function = {"name": "f", "arguments": {"a": 1}}
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function, "id": "call_1"}],
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a":1}', {"a": 1}),
        ('{"b": [1.5, null], "a": "\\u00e9<"}', {"b": [1.5, None], "a": "é<"}),
        ({"a": None}, {"a": None}),
        ("", {}),
        (None, {}),
    ],
)
def test_t12_a36_arguments_become_an_object(arguments: object, expected: dict[str, Any]) -> None:
    message = one(role="assistant", tool_calls=[call(arguments)])
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_absent_arguments_and_an_absent_type_are_filled_in() -> None:
    message = one(role="assistant", tool_calls=[{"function": {"name": "f"}}])
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    "arguments",
    [
        "{bad",
        "[1]",
        "3",
        "null",
        " ",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        "[" * 100_000,
        [1],
        [],
        3,
        0,
        False,
    ],
)
def test_a36_arguments_that_are_no_json_object_are_refused_by_message(arguments: object) -> None:
    with pytest.raises(RequestError) as caught:
        normalise_messages([USER, {"role": "assistant", "tool_calls": [call(), call(arguments)]}])
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"
    assert len(caught.value.message) < 200


REFUSED: list[tuple[object, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ({"role": "user", "content": "hi"}, "messages"),
    ([USER, None], "messages[1]"),
    (["hi"], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "foo", "content": "a"}], "messages[0].role"),
    ([{"role": "function", "name": "f", "content": "a"}], "messages[0].role"),
    ([{"role": 1, "content": "a"}], "messages[0].role"),
    ([{"role": ["user"], "content": "a"}], "messages[0].role"),
    ([USER, USER, {"role": "user"}], "messages[2].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "assistant", "content": None}], "messages[0].content"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
    ([{"role": "tool", "content": None, "tool_call_id": "x"}], "messages[0].content"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text", "text": "a"}}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [text_part("a"), {"type": "image_url"}]}], "messages[0].content[1].type"),
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [text_part("a") | {"lang": "en"}]}], "messages[0].content[0].lang"),
    ([{"role": "user", "content": "a", "name": 1}], "messages[0].name"),
    ([{"role": "user", "content": "a", "image": "x"}], "messages[0].image"),
    ([{"role": "user", "content": "a", "tool_calls": [call()]}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "a", "reasoning_content": "r"}], "messages[0].reasoning_content"),
    ([{"role": "user", "content": "a", "tool_call_id": "x"}], "messages[0].tool_call_id"),
    ([{"role": "tool", "content": "a", "tool_call_id": 1}], "messages[0].tool_call_id"),
    ([{"role": "assistant", "content": "a", "refusal": "no"}], "messages[0].refusal"),
    ([{"role": "assistant", "content": "a", "annotations": [{}]}], "messages[0].annotations"),
    ([{"role": "assistant", "content": "a", "reasoning_content": ["r"]}], "messages[0].reasoning_content"),
    ([{"role": "assistant", "content": "a", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": [call(type="custom")]}], "messages[0].tool_calls[0].type"),
    ([{"role": "assistant", "tool_calls": [call(id=1)]}], "messages[0].tool_calls[0].id"),
    ([{"role": "assistant", "tool_calls": [call(extra=1)]}], "messages[0].tool_calls[0].extra"),
    ([{"role": "assistant", "tool_calls": [call(function={})]}], "messages[0].tool_calls[0].function.name"),
    ([{"role": "assistant", "tool_calls": [call(function={"name": ""})]}], "messages[0].tool_calls[0].function.name"),
    (
        [{"role": "assistant", "tool_calls": [call(function={"name": "f", "parameters": {}})]}],
        "messages[0].tool_calls[0].function.parameters",
    ),
    ([{"role": "user", "content": "a\ud83d"}], "messages[0].content"),
    ([{"role": "user", "content": [text_part("\udc00")]}], "messages[0].content[0].text"),
]


@pytest.mark.parametrize(("messages", "param"), REFUSED, ids=[f"{i}-{case[1]}" for i, case in enumerate(REFUSED)])
def test_a17_a37_what_cannot_be_served_is_refused_naming_the_place(messages: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise_messages(messages)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param} ")
    assert "\n" not in caught.value.message


def test_the_given_messages_are_left_as_they_are() -> None:
    messages = (
        {"role": "developer", "content": [text_part("s")], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": {"b": 1}}')]},
    )
    before = copy.deepcopy(messages)
    normalise_messages(messages)
    assert messages == before
