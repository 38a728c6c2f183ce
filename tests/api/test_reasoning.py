"""Reasoning over HTTP. The tokens of the small model are forced; its tokenizer and template are of Qwen3's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupyllm.api.protocol.thinking import read_thinking
from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, run_server, write_model_folder
from tests.api.scripted import CHAT, Actor, ScriptedOps, put_together, without_ids
from tests.qwen_tokenizer import QWEN3_TEMPLATE, write_tokenizer_folder

THOUGHT = "<think>\nParis, 18 degrees.\n\nSo: mild.\n</think>\n\nIt is mild."
OPENING_TEMPLATE = QWEN3_TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)


def test_29_reasoning_is_given_apart_from_content(actor: Actor) -> None:
    plain = actor.ask(THOUGHT)
    assert plain["message"] == {
        "role": "assistant",
        "content": "It is mild.",
        "refusal": None,
        "reasoning_content": "Paris, 18 degrees.\n\nSo: mild.",
    }
    assert without_ids(put_together(actor.ask_stream(THOUGHT))) == without_ids(plain)
    actor.tell(THOUGHT)
    answer = actor.server.openai().chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.reasoning_content == "Paris, 18 degrees.\n\nSo: mild."


def test_every_piece_of_a_stream_is_reasoning_or_content(actor: Actor) -> None:
    deltas = [choice["delta"] for chunk in actor.ask_stream(THOUGHT) for choice in chunk["choices"]]
    assert all(set(delta) in ({"reasoning_content"}, {"content"}) for delta in deltas[1:-1])
    kinds = ["reasoning_content" in delta for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"
    assert kinds.count(True) > 5


def test_24_reasoning_tokens_are_counted(actor: Actor) -> None:
    tokenizer = actor.server.loaded.tokenizer
    expected = len(tokenizer.encode(THOUGHT.partition("</think>")[0])) + 1
    for text, count in [(THOUGHT, expected), ("no thought", 0)]:
        actor.tell(text)
        usage = actor.server.post(CHAT, {"messages": MESSAGES, "temperature": 0}).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
        last = actor.ask_stream(text, stream_options={"include_usage": True})[-1]
        assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


@pytest.mark.parametrize(
    "text", ["Marks like <think> and </think> are text here.", "It </think> is <think>\n so.", " \n"]
)
def test_marks_within_the_content_are_content(actor: Actor, text: str) -> None:
    plain = actor.ask(text)
    assert without_ids(plain) == (text, "", [], "stop")
    assert without_ids(put_together(actor.ask_stream(text))) == without_ids(plain)


@pytest.mark.parametrize("limit", range(1, 40, 3))
def test_an_answer_cut_off_while_thinking_has_reasoning_alone(actor: Actor, limit: int) -> None:
    plain = actor.ask(THOUGHT, max_tokens=limit)
    assert plain["finish_reason"] == "length"
    assert "Paris, 18 degrees.\n\nSo: mild.".startswith(plain["message"].get("reasoning_content", ""))
    assert "It is mild.".startswith(plain["message"]["content"])
    assert without_ids(put_together(actor.ask_stream(THOUGHT, max_tokens=limit))) == without_ids(plain)


@pytest.mark.parametrize(("stop", "content"), [("mild", "It is "), ("Paris", "It is mild."), ("\n\n", "It is mild.")])
def test_stop_strings_end_the_content_and_not_the_reasoning(actor: Actor, stop: str, content: str) -> None:
    plain = actor.ask(THOUGHT, stop=stop)
    assert without_ids(plain) == (content, "Paris, 18 degrees.\n\nSo: mild.", [], "stop")
    assert without_ids(put_together(actor.ask_stream(THOUGHT, stop=stop))) == without_ids(plain)


def test_a_template_that_begins_the_reasoning_itself(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, template=OPENING_TEMPLATE)
    made: list[ScriptedOps] = []
    with run_server(folder, prepare=lambda loaded: made.append(ScriptedOps(loaded))) as live:
        actor = Actor(live, made[0])
        text = THOUGHT.removeprefix("<think>\n")
        plain = actor.ask(text)
        assert without_ids(plain) == ("It is mild.", "Paris, 18 degrees.\n\nSo: mild.", [], "stop")
        assert without_ids(put_together(actor.ask_stream(text))) == without_ids(plain)
        off = actor.ask("It is mild.", chat_template_kwargs={"enable_thinking": False})
        assert without_ids(off) == ("It is mild.", "", [], "stop")


def test_a_model_without_marks_has_no_reasoning(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    write_tokenizer_folder(folder)
    made: list[ScriptedOps] = []
    with run_server(folder, prepare=lambda loaded: made.append(ScriptedOps(loaded))) as live:
        actor = Actor(live, made[0])
        actor.tell(THOUGHT)
        answer = live.post(CHAT, {"messages": MESSAGES, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == THOUGHT
    assert "completion_tokens_details" not in answer["usage"]


def prompt_of(server: LiveServer, **fields: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True} | fields
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    return server.loaded.tokenizer.decode(response.json()["prompt_token_ids"], skip_special_tokens=False)


def test_43_reasoning_effort_none_turns_thinking_off(server: LiveServer) -> None:
    off = prompt_of(server, chat_template_kwargs={"enable_thinking": False})
    assert off.endswith("<think>\n\n</think>\n\n")
    assert prompt_of(server, reasoning_effort="none") == off
    assert prompt_of(server, reasoning_effort="high") == prompt_of(server)
    body = {"messages": MESSAGES, "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    response = server.post(CHAT, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_the_reasoning_and_the_answer_follows(actor: Actor, budget: int) -> None:
    """The script goes on as if nothing had happened, so what is left of the thought after the end of it is content."""
    tokenizer = actor.server.loaded.tokenizer
    thought = [
        *tokenizer.encode("<think>"),
        *tokenizer.encode(THOUGHT.removeprefix("<think>").partition("</think>")[0]),
    ]
    plain = actor.ask(THOUGHT, thinking_budget=budget, return_token_ids=True)
    ids = plain["token_ids"]
    forced = tokenizer.encode("\n</think>\n\n")
    assert ids[: budget + 1] == thought[: budget + 1]
    assert ids[budget + 1 : budget + 1 + len(forced)] == forced
    assert plain["message"].get("reasoning_content", "") == tokenizer.decode(thought[1 : budget + 1]).strip("\n")
    assert without_ids(put_together(actor.ask_stream(THOUGHT, thinking_budget=budget))) == without_ids(plain)


def test_a_budget_that_is_not_spent_changes_nothing(actor: Actor) -> None:
    free = actor.ask(THOUGHT, return_token_ids=True)
    assert actor.ask(THOUGHT, return_token_ids=True, thinking_budget=200) == free
    assert actor.ask(THOUGHT, return_token_ids=True, reasoning_effort="low") == free
    assert actor.ask("No thought.", thinking_budget=0)["message"]["content"] == "No thought."


def test_43_the_levels_of_effort_are_budgets_unless_one_is_given() -> None:
    budgets = [read_thinking(effort, None, None).budget for effort in ("minimal", "low", "medium", "high")]
    assert budgets == [256, 1024, 8192, None]
    assert read_thinking("low", None, 7).budget == 7
    assert read_thinking(None, True, None).budget is None


def test_a_budget_cannot_be_kept_in_a_beam_search(server: LiveServer) -> None:
    for field in ({"thinking_budget": 5}, {"reasoning_effort": "low"}):
        response = server.post(CHAT, {"messages": MESSAGES, "use_beam_search": True} | field)
        assert response.status_code == 400
        assert [response.json()["error"]["param"]] == list(field)


def test_reasoning_can_be_sent_back(actor: Actor) -> None:
    message = actor.ask(THOUGHT)["message"]
    prompt = prompt_of(actor.server, messages=[*MESSAGES, message], add_generation_prompt=False)
    assert prompt.endswith("assistant\n" + THOUGHT + "<|im_end|>\n")


# -- how a prompt ends -------------------------------------------------------------------------------


def test_a_final_message_is_continued(server: LiveServer) -> None:
    for content in ("The answer", "ends in spaces  \n", "<|im_end|", "a<|im_end|>", "x<think>"):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        prompt = prompt_of(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
        assert prompt == prompt_of(server) + content
        assert prompt == prompt_of(server, messages=messages, continue_final_message=True)
    ids = server.post(
        CHAT,
        {"messages": messages, "continue_final_message": True, "max_tokens": 1, "return_token_ids": True},
    ).json()["prompt_token_ids"]
    assert server.loaded.tokenizer.added_tokens["<think>"] not in ids


def test_without_a_generation_prompt_the_conversation_just_ends(server: LiveServer) -> None:
    assert prompt_of(server, add_generation_prompt=False) + "<|im_start|>assistant\n" == prompt_of(server)


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": True, "messages": [*MESSAGES, {"role": "assistant", "content": "a"}]},
        {"messages": MESSAGES},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
        {"messages": []},
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused(server: LiveServer, fields: dict[str, Any]) -> None:
    response = server.post(CHAT, {"continue_final_message": True} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"
