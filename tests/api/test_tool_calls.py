"""Tool calls over HTTP. A small random model does not call tools, so its tokens are forced; all else is real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cupyllm.messages import normalise_messages
from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, run_server
from tests.api.scripted import CHAT, Actor, put_together, script_of, without_ids

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris \U0001fae0 </tool_call>"}}\n</tool_call>'
TOOLS: Any = {"tools": [WEATHER, NOW]}
TIME = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        PARIS,
        PARIS + "\n" + TIME,
        "Let me look.\n" + PARIS,
        TIME + "\nDone.",
        "no call at all",
        "<tool_call>\nbroken\n</tool_call> and <tool_cal",
        '<tool_call>\n{"name": "f", "arguments": {"broken": }}\n</tool_call>',
        "<think>\nI need the weather.\n</think>\n\n" + PARIS,
        "<think>\nOnly <tool_call> thoughts.\n</think>\n\nAnswer",
    ],
)
def test_a35_streamed_and_plain_answers_are_the_same(actor: Actor, text: str) -> None:
    plain = actor.ask(text, **TOOLS)
    assert without_ids(put_together(actor.ask_stream(text, **TOOLS))) == without_ids(plain)
    assert (plain["finish_reason"] == "tool_calls") == ("tool_calls" in plain["message"])


def test_22_36_an_answer_of_calls_alone_has_null_content(actor: Actor) -> None:
    choice = actor.ask(PARIS + "\n" + TIME, **TOOLS)
    first, second = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert first["function"]["name"] == "get_weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Paris \U0001fae0 </tool_call>"}
    assert (second["type"], second["function"]) == ("function", {"name": "now", "arguments": "{}"})
    assert first["id"] != second["id"]
    assert first["id"].startswith("call_")


def test_17_the_official_client_accumulates_streamed_calls(actor: Actor) -> None:
    client = actor.server.openai()
    request: Any = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 0}
    strict = {**WEATHER, "function": WEATHER["function"] | {"strict": True}}
    actor.tell("Let me look.\n" + PARIS + PARIS)
    with client.chat.completions.stream(**request, tools=[strict]) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        choice = stream.get_final_completion().choices[0]
    assert [(event.index, event.name) for event in events] == [(0, "get_weather"), (1, "get_weather")]
    assert choice.message.tool_calls is not None
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [
        {"city": "Paris \U0001fae0 </tool_call>"}
    ] * 2
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    actor.tell(TIME)
    plain = client.chat.completions.create(**request, tools=[NOW]).choices[0]
    assert plain.message.tool_calls is not None
    assert plain.message.tool_calls[0].function.name == "now"


def test_arguments_are_streamed_as_fragments(actor: Actor) -> None:
    chunks = actor.ask_stream(PARIS, **TOOLS)
    pieces = [
        call["function"]["arguments"]
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert len(pieces) > 5
    assert "".join(pieces) == '{"city": "Paris \U0001fae0 </tool_call>"}'


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
def test_39_without_tools_or_with_none_all_is_content_and_no_tool_is_shown(actor: Actor, fields: Any) -> None:
    choice = actor.ask(PARIS, **(TOOLS | fields))
    assert choice["message"] == {"role": "assistant", "content": PARIS, "refusal": None}
    assert choice["finish_reason"] == "stop"
    shown = actor.server.post(
        CHAT, {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, "tools": [NOW]} | fields
    )
    ids = shown.json()["prompt_token_ids"]
    assert "Tools:" not in actor.server.loaded.tokenizer.decode(ids)


def test_parallel_tool_calls_false_ends_the_answer_after_one_call(actor: Actor) -> None:
    text = "Look: " + TIME + "\n" + PARIS + " more"
    plain = actor.ask(text, parallel_tool_calls=False, return_token_ids=True, **TOOLS)
    assert without_ids(plain) == ("Look:", "", [("function", "now", "{}")], "tool_calls")
    assert without_ids(put_together(actor.ask_stream(text, parallel_tool_calls=False, **TOOLS))) == without_ids(plain)
    tokens = actor.server.loaded.tokenizer.decode(plain["token_ids"])
    assert text.startswith(tokens), "the engine did not go on"
    assert len(tokens) < text.index("Paris")
    assert len(actor.ask(text, **TOOLS)["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("n", [2])
def test_each_answer_has_its_own_calls(actor: Actor, n: int) -> None:
    chunks = actor.ask_stream(PARIS, n=n, **TOOLS)
    ids = set()
    for index in range(n):
        choice = put_together(chunks, index)
        assert choice["finish_reason"] == "tool_calls"
        ids |= {call["id"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == n


def test_bar_24_a_call_that_is_cut_off_ends_with_length_and_keeps_its_text(actor: Actor) -> None:
    full = len(script_of(actor.server.loaded.tokenizer, PARIS))
    whole = '{"city": "Paris \U0001fae0 </tool_call>"}'
    for limit in range(1, full - 1):
        choice = actor.ask(PARIS, max_tokens=limit, **TOOLS)
        assert choice["finish_reason"] == "length"
        assert without_ids(put_together(actor.ask_stream(PARIS, max_tokens=limit, **TOOLS))) == without_ids(choice)
        if "tool_calls" in choice["message"]:
            assert whole.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"].rstrip("\ufffd"))
        else:
            assert PARIS.startswith(choice["message"]["content"])


def test_token_ids_are_all_there_though_text_is_held_back(actor: Actor) -> None:
    plain = actor.ask(PARIS, return_token_ids=True, **TOOLS)
    chunks = actor.ask_stream(PARIS, return_token_ids=True, **TOOLS)
    streamed = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
    assert streamed == plain["token_ids"] == script_of(actor.server.loaded.tokenizer, PARIS)


def test_36_38_an_answer_with_calls_can_be_sent_back_with_results(actor: Actor) -> None:
    message = actor.ask("Let me look.\n" + PARIS, **TOOLS)["message"]
    call_id = message["tool_calls"][0]["id"]
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": call_id, "content": "18 °C <|im_end|>"}]
    actor.tell("Fine.")
    answer = actor.server.post(
        CHAT, {"messages": history, "tools": [WEATHER], "temperature": 0, "return_token_ids": True}
    ).json()
    assert answer["choices"][0]["message"]["content"] == "Fine."
    tokenizer, template = actor.server.loaded.tokenizer, actor.server.loaded.chat_template
    assert template is not None
    assert answer["prompt_token_ids"] == template.encode(normalise_messages(history), tools=[WEATHER])
    prompt = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert "Let me look.\n" + PARIS + "<|im_end|>" in prompt, "the model sees what it wrote"
    assert "<tool_response>\n18 °C <|im_end|>\n</tool_response>" in prompt
    ids = answer["prompt_token_ids"]
    assert ids.count(tokenizer.added_tokens["</tool_call>"]) == 1, "that in the argument is text"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "tool_choice"),
        ({"type": "custom", "custom": {"name": "now"}}, "tool_choice.type"),
        ({"type": "function", "function": {"name": "later"}}, "tool_choice.function.name"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "name": "now"}, "tool_choice.name"),
    ],
)
def test_39_a_tool_choice_that_cannot_be_honoured_is_refused(server: LiveServer, choice: Any, param: str) -> None:
    response = server.post(CHAT, {"messages": MESSAGES, "tools": [NOW], "tool_choice": choice})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(("count", "status"), [(128, 200), (129, 400)])
def test_the_limit_of_tools(model_folder: Path, server: LiveServer, count: int, status: int) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
    response = server.post(CHAT, {"messages": MESSAGES, "tools": tools, "tool_choice": "none", "max_tokens": 1})
    assert response.status_code == status, response.text


def test_functions_are_refused_by_the_name_of_what_replaced_them(server: LiveServer) -> None:
    for name, value, instead in [("functions", [{"name": "f"}], "tools"), ("function_call", "auto", "tool_choice")]:
        error = server.post(CHAT, {"messages": MESSAGES, name: value}).json()["error"]
        assert (error["message"], error["param"]) == (f"{name} is not supported; use {instead}", name)


def test_tools_are_refused_where_the_template_cannot_show_them(server: LiveServer, tmp_path: Path) -> None:
    with run_server(Path("demo")) as live:
        response = live.post(CHAT, {"messages": MESSAGES, "tools": [NOW]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
