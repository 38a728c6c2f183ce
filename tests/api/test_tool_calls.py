"""Tool calls over HTTP. A small random model does not call tools, so its tokens are forced; all else is real."""

from __future__ import annotations

import json
import sys
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
    rome = PARIS.replace("Paris \U0001fae0 </tool_call>", "Rome")
    actor.tell("Let me look.\n" + rome + "\n" + rome)
    with client.chat.completions.stream(**request, tools=[strict]) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        choice = stream.get_final_completion().choices[0]
    assert [(event.index, event.name) for event in events] == [(0, "get_weather"), (1, "get_weather")]
    assert choice.message.tool_calls is not None
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [{"city": "Rome"}] * 2
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


def test_functions_are_refused_by_the_name_of_what_replaced_them(server: LiveServer) -> None:
    for name, value, instead in [("functions", [{"name": "f"}], "tools"), ("function_call", "auto", "tool_choice")]:
        error = server.post(CHAT, {"messages": MESSAGES, name: value}).json()["error"]
        assert (error["message"], error["param"]) == (f"{name} is not supported; use {instead}", name)


def test_tools_are_refused_where_the_template_cannot_show_them(server: LiveServer, tmp_path: Path) -> None:
    with run_server(Path("demo")) as live:
        response = live.post(CHAT, {"messages": MESSAGES, "tools": [NOW]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


# -- calls that a grammar enforces -------------------------------------------------------------------

FORECAST: Any = {
    "type": "function",
    "function": {
        "name": "forecast",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "forecast"}}
BROKEN = '<tool_call>\n{"name": "forecast", "arguments": {"town": 5}}\n</tool_call>'


BAD: Any = {"type": "function", "function": {"name": "bad"}}


def bad_schema(strict: bool) -> Any:
    """A tool whose schema asks for something that no grammar can keep."""
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    return {"type": "function", "function": {"name": "bad", "parameters": parameters, "strict": strict}}


def assert_valid(call: Any) -> None:
    """As the schemas of forecast and now say."""
    assert call["function"]["name"] in ("forecast", "now")
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "now":
        assert arguments == {}
    else:
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Paris", "Rome")
        assert arguments["days"] in range(1, 10)


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("wish", ["I would rather talk.", BROKEN, "<think>\nHm.\n</think>\n\nNo.", ""])
def test_39_a_call_that_is_required_comes_whatever_the_model_wants(actor: Actor, choice: Any, wish: str) -> None:
    fields: dict[str, Any] = {"tools": [NOW, FORECAST], "tool_choice": choice}
    fields |= {"parallel_tool_calls": False} if choice == "required" else {}  # a named call is one call
    plain = actor.ask(wish, **fields)
    assert plain["finish_reason"] == "tool_calls"
    assert plain["message"]["content"] is None
    (call,) = plain["message"]["tool_calls"]
    assert_valid(call)
    assert choice == "required" or call["function"]["name"] == "forecast"
    assert plain["message"].get("reasoning_content", "") == ("Hm." if "Hm" in wish else "")
    assert without_ids(put_together(actor.ask_stream(wish, **fields))) == without_ids(plain)


@pytest.mark.parametrize("seed", range(5))
def test_39_required_calls_of_a_random_model_are_valid(server: LiveServer, seed: int) -> None:
    body = {"messages": MESSAGES, "tools": [FORECAST, NOW], "tool_choice": "required", "temperature": 1.5, "seed": seed}
    (choice,) = server.post(CHAT, body | {"max_tokens": 200, "reasoning_effort": "none"}).json()["choices"]
    calls = choice["message"]["tool_calls"]
    complete = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
    assert choice["finish_reason"] in ("tool_calls", "length")
    for call in complete:
        assert_valid(call)


def test_a_required_call_ends_where_its_grammar_does(actor: Actor) -> None:
    text = TIME + "\n" + PARIS + "\nand more"
    choice = actor.ask(text, tool_choice="required", **TOOLS)
    names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
    assert names[:2] == ["now", "get_weather"]
    assert choice["message"]["content"] is None


def test_a_strict_tool_that_the_model_chooses_is_called_by_its_schema(actor: Actor) -> None:
    lenient = {**FORECAST, "function": FORECAST["function"] | {"strict": False}}
    assert (
        actor.ask("Look: " + BROKEN, tools=[lenient])["message"]["tool_calls"][0]["function"]["arguments"]
        == '{"town": 5}'
    )
    choice = actor.ask("Look: " + BROKEN, tools=[FORECAST], parallel_tool_calls=False)
    assert choice["message"]["content"] == "Look:"
    assert_valid(choice["message"]["tool_calls"][0])
    assert actor.ask("No call.", tools=[FORECAST])["message"]["content"] == "No call."


def test_a_budget_ends_the_reasoning_before_a_required_call(actor: Actor) -> None:
    thought = "<think>\nlong and longer\n</think>\n\n"
    choice = actor.ask(thought, tools=[NOW], tool_choice="required", parallel_tool_calls=False, thinking_budget=2)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert_valid(choice["message"]["tool_calls"][0])
    assert "long and longer".startswith(choice["message"].get("reasoning_content", ""))


JSON_ANSWER: Any = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {"mild": {"type": "boolean"}}}},
}


@pytest.mark.parametrize("tools", [[NOW], [NOW, FORECAST], None])
@pytest.mark.parametrize("thought", ["", "<think>\nIs it?\n</think>\n\n"])
def test_a_form_of_the_content_leaves_room_for_reasoning_and_calls(actor: Actor, tools: Any, thought: str) -> None:
    fields = {"response_format": JSON_ANSWER, "tools": tools, "parallel_tool_calls": False}
    choice = actor.ask(thought + "Plain words.", max_tokens=150, **fields)
    assert choice["message"].get("reasoning_content", "") == thought[8:-11]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    elif choice["finish_reason"] == "tool_calls":
        assert_valid(choice["message"]["tool_calls"][0])
    assert actor.ask(thought + '{"mild": true}', **fields)["message"]["content"] == '{"mild": true}'
    if tools:
        choice = actor.ask(thought + TIME, **fields)
        assert without_ids(choice) == ("", thought[8:-11], [("function", "now", "{}")], "tool_calls")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [NOW], "tool_choice": "required", "response_format": JSON_ANSWER}, "tool_choice"),
        ({"tools": [NOW, bad_schema(strict=True)], "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"tools": [NOW, bad_schema(strict=True)], "tool_choice": BAD}, "tools[1].function.parameters"),
        ({"tools": [NOW, bad_schema(strict=True)]}, "tools[1].function.parameters"),
        ({"tools": [NOW], "tool_choice": "required", "use_beam_search": True}, "tool_choice"),
        ({"tools": [FORECAST], "use_beam_search": True}, "tools"),
    ],
)
def test_what_cannot_be_enforced_is_refused(server: LiveServer, fields: Any, param: str) -> None:
    response = server.post(CHAT, {"messages": MESSAGES} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert param in response.json()["error"]["message"]


def test_without_the_library_only_calls_that_must_be_enforced_are_refused(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert actor.ask(TIME, **TOOLS)["finish_reason"] == "tool_calls"
    for fields in ({"tools": [NOW], "tool_choice": "required"}, {"tools": [FORECAST]}):
        error = actor.server.post(CHAT, {"messages": MESSAGES} | fields).json()["error"]
        assert "pip install 'cupyllm[structured]'" in error["message"]
        assert error["param"] == ("tool_choice" if "tool_choice" in fields else "tools")
