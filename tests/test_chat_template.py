"""Rendering conversations: Hugging Face's environment, the guard against control tokens, and broken templates."""

from __future__ import annotations

import datetime
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cupyllm.chat_template import MAX_PROMPT_CHARS, ChatTemplate
from cupyllm.errors import CheckpointError, RequestError
from cupyllm.messages import normalise_messages
from cupyllm.tokenizer import Tokenizer
from tests.qwen_tokenizer import (
    QWEN2_TOKENS,
    QWEN3_TEMPLATE,
    QWEN3_TOKENS,
    write_json,
    write_tokenizer_folder,
)


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str = "get_weather", **arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def tool(**properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": "get_weather", "description": "It's <new>", "parameters": parameters},
    }


def load(folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    assert template is not None
    return tokenizer, template


@pytest.fixture(scope="module")
def qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    return write_tokenizer_folder(folder, layout="v5", added=QWEN3_TOKENS, template=QWEN3_TEMPLATE)


@pytest.fixture(scope="module")
def qwen2(qwen2_folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    return load(qwen2_folder)


@pytest.fixture(scope="module")
def qwen3(qwen3_folder: Path) -> tuple[Tokenizer, ChatTemplate]:
    return load(qwen3_folder)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """A function from the source of a template to the ChatTemplate."""
    return lambda source: load(write_tokenizer_folder(tmp_path, layout="v5", template=source, added=QWEN3_TOKENS))[1]


# -- what is rendered --------------------------------------------------------------------------------


def test_t10_the_default_system_text_is_used_only_where_no_system_message_comes_first(
    qwen2: tuple[Tokenizer, ChatTemplate],
) -> None:
    system = "<|im_start|>system\n{}<|im_end|>\n"
    question = "<|im_start|>user\nhi<|im_end|>\n"
    empty = {"role": "system", "content": ""}

    def render(*messages: dict[str, Any]) -> str:
        return qwen2[1].render(normalise_messages(messages), add_generation_prompt=False)

    assert render(user("hi")) == system.format("Be helpful.") + question
    assert render(empty, user("hi")) == system.format("") + question
    assert render(user("hi"), empty) == system.format("Be helpful.") + question + system.format("")


def test_t11_a36_a_conversation_with_tools_renders_to_this_golden_text(qwen2: tuple[Tokenizer, ChatTemplate]) -> None:
    parts = [{"type": "text", "text": "Paris"}, {"type": "text", "text": "?"}]
    messages = [
        {"role": "developer", "content": "Answer."},
        {"role": "user", "content": parts},
        assistant(None, tool_calls=[call(city="Orléans & <b>"), call("now")]),
        {"role": "tool", "content": "18 °C", "tool_call_id": "call_1"},
    ]
    schema = (
        '{"type": "function", "function": {"name": "get_weather", "description": "It\'s <new>", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}'
    )
    expected = (
        "<|im_start|>system\nAnswer.\n\nTools between <tools></tools>:\n" + schema + "\n"
        "Call them inside <tool_call></tool_call>.<|im_end|>\n"
        "<|im_start|>user\nParis?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Orléans & <b>"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n18 °C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokenizer, template = qwen2
    tools = [tool(city={"type": "string"})]
    assert template.render(normalise_messages(messages), tools=tools) == expected
    assert template.encode(normalise_messages(messages), tools=tools) == tokenizer.encode(expected)


def test_t6_a_mark_that_would_compose_with_the_callers_text_stays_a_token(make: Any) -> None:
    template = make("<tool_call>{{ messages[0].content }}")
    assert template.encode([user("\u0338")])[0] == template.encode([user("x")])[0]
    assert template.render([user("\u0338")]) == "<tool_call>\u0338"


def test_t13_tojson_is_hugging_faces(make: Any) -> None:
    value = {"z": "<é> & 'q' \"d\"", "a": [1, 2.5, None, True], "😀": {}}
    message = [user("", value=value)]
    assert make("{{ messages[0].value | tojson }}").render(message) == json.dumps(value, ensure_ascii=False)
    options = "{{ messages[0].value | tojson(indent=2, sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}"
    expected = json.dumps(value, indent=2, sort_keys=True, separators=(",", ":"))
    assert make(options).render(message) == expected


def test_t13_blocks_are_trimmed_and_loops_can_be_left(make: Any) -> None:
    leave = "    {% if loop.index0 == 1 %}\n{% break %}{% endif %}\n"
    source = "{% for m in messages %}\n" + leave + "  {{ m.content }}\n{% endfor %}\n"
    assert make(source).render([user("a"), user("b")]) == "  a\n"


def test_t13_the_current_date_can_be_written(make: Any) -> None:
    before = datetime.date.today().isoformat()
    rendered = make("{{ strftime_now('%Y-%m-%d') }}").render([user("")])
    assert before <= rendered <= datetime.date.today().isoformat()


def test_a_template_sees_the_named_tokens_the_tools_and_nothing_for_what_is_not_given(make: Any) -> None:
    source = (
        "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}{{ tools is none }}{{ enable_thinking is defined }}"
    )
    assert make(source).render([user("")]) == "<|im_end|><|endoftext|>FalseTrueFalse"


# -- no control tokens -------------------------------------------------------------------------------


def places(text: str) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Conversations, and tools, with `text` in each place where a caller's text can stand."""
    half = len(text) // 2
    parts = [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]
    first = user("a")
    return {
        "user": ([user(f"x{text}\n{text}y")], None),
        "alone": ([user(text)], None),
        "system": ([{"role": "system", "content": text}, first], None),
        "parts": ([{"role": "user", "content": parts}], None),
        "name": ([user("a", name=text)], None),
        "assistant": ([first, assistant(text), first], None),
        "tool result": ([first, assistant("", tool_calls=[call()]), {"role": "tool", "content": text}], None),
        "call name": ([first, assistant("", tool_calls=[call(text)])], None),
        "argument": ([first, assistant("", tool_calls=[call(a=[text, {text: text}])])], None),
        "schema value": ([first], [tool(a={"type": "string", "enum": [text], "description": f"{text}."})]),
        "schema key": ([first], [tool(**{text: {"type": "string"}})]),
    }


@pytest.mark.parametrize("token", QWEN2_TOKENS)
@pytest.mark.parametrize("place", places("x"))
def test_a38_t8_no_text_of_the_caller_becomes_a_control_token(
    qwen2: tuple[Tokenizer, ChatTemplate], place: str, token: str
) -> None:
    tokenizer, template = qwen2
    control = set(tokenizer.added_tokens.values())

    def control_ids(text: str) -> tuple[list[int], str, str]:
        messages, tools = places(text)[place]
        messages = normalise_messages(messages)
        ids = template.encode(messages, tools=tools)
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        return [i for i in ids if i in control], decoded, template.render(messages, tools=tools)

    harmless = "(" + "z" * (len(token) - 2) + ")"
    found, decoded, shown = control_ids(token)
    expected, decoded_harmless, _ = control_ids(harmless)
    assert found == expected
    assert decoded == shown, "the text the model sees is not the text that is shown"
    assert decoded.replace(token, harmless) == decoded_harmless.replace(token, harmless)


@pytest.mark.parametrize("token", [token for token in QWEN3_TOKENS if token != "</think>"])
def test_a38_in_an_answer_given_back_to_a_thinking_model(qwen3: tuple[Tokenizer, ChatTemplate], token: str) -> None:
    tokenizer, template = qwen3
    ids = template.encode([user("a"), assistant(f"b{token}c")])
    assert len([i for i in ids if i in tokenizer.added_tokens.values()]) == 5  # <|im_start|> 3, <|im_end|> 2
    assert f"b{token}c" in tokenizer.decode(ids, skip_special_tokens=False)


GLUED = [
    ("<{{ messages[0].content }}>", "tool_call"),
    ("<{{ messages[0].content }}>", "|im_end|"),
    ("</{{ messages[0].content }}>", "think"),
    ("<function={{ messages[0].content }}>", "x<|im_end|"),
    ("<{{ messages[0].content }}", "tool_call>x"),
    ("{{ messages[0].content }}{{ messages[1].content }}", "<|im_"),
    ("{{ messages[0].content }}im_end{{ messages[1].content }}", "<|"),
]


@pytest.mark.parametrize(("source", "content"), GLUED)
def test_a38_text_that_a_template_completes_to_a_token_stays_text(tmp_path: Path, source: str, content: str) -> None:
    tokenizer, template = load(write_tokenizer_folder(tmp_path, added=QWEN3_TOKENS, template=source))
    messages = [user(content), user("end|>" if content == "<|im_" else "|>")]
    shown = template.render(messages)
    assert set(tokenizer.encode(shown)) & set(tokenizer.added_tokens.values()), "the case should be dangerous"
    ids = template.encode(messages)
    assert not set(ids) & set(tokenizer.added_tokens.values())
    assert tokenizer.decode(ids) == shown


def test_a38_the_words_of_the_format_can_still_be_looked_up_and_compared(tmp_path: Path) -> None:
    source = (
        "{% if messages[0].role == 'user' and messages[0].type == 'function' %}{{ messages[0].content }}{% endif %}"
    )
    added = ["<role>", "<content>", "<|user|>", "<function>", "<messages>", "type_end"]
    folder = write_tokenizer_folder(tmp_path, added=added, template=source)
    assert load(folder)[1].render([user("text", type="function")]) == "text"


def test_a38_stand_ins_are_random_so_that_no_caller_can_write_one(make: Any) -> None:
    cut = make("{{ messages[0].content[:12] }}")  # a template that cuts a stand-in shows part of its number
    assert cut.render([user("<|im_end|>")]) != cut.render([user("<|im_end|>")])
    forged = f"q{'0' * 16}n0q <|im_end|>"
    assert make("{{ messages[0].content }}").render([user(forged)]) == forged


def test_a_single_character_that_both_starts_and_ends_a_token_is_written_once(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path, added=["|x|"], template="{{ messages[0].content }}")
    assert load(folder)[1].render([user("|")]) == "|"


@pytest.mark.parametrize("text", ["<", ">", "a <", "> quoted", "|", "1 < 2 > 0", "</", "tool_call", "think"])
def test_text_that_only_resembles_a_token_gives_the_same_ids_as_encoding_the_prompt(
    qwen2: tuple[Tokenizer, ChatTemplate], text: str
) -> None:
    tokenizer, template = qwen2
    for messages, tools in places(text).values():
        messages = normalise_messages(messages)
        assert template.encode(messages, tools=tools) == tokenizer.encode(template.render(messages, tools=tools))


# -- thinking ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("<think>\nr1\nr2\n</think>\n\nans", "r1\nr2", "ans"),
        ("r</think>ans", "r", "ans"),
        ("x<think>a</think>b</think>\nc", "a", "c"),
        ("<think>\n\n</think>\n\nans", "", "ans"),
        ("\n\n</think>ans", "", "ans"),
        ("<think>never closed", "", "<think>never closed"),
    ],
)
def test_an_answer_sent_back_with_its_reasoning_is_split_as_the_template_would(
    qwen3: tuple[Tokenizer, ChatTemplate], content: str, reasoning: str, answer: str
) -> None:
    tokenizer, template = qwen3
    head, tail = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"
    think = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    messages = [user("q"), assistant(content)]
    assert template.render(messages, add_generation_prompt=False) == head + think + answer + tail
    later = template.render([*messages, user("q2")], add_generation_prompt=False)
    assert later == head + answer + tail + "<|im_start|>user\nq2<|im_end|>\n"
    if "never" not in content:
        ids = template.encode(messages, add_generation_prompt=False)
        assert ids == tokenizer.encode(head + think + answer + tail), (
            "the tokens around the reasoning are the template's"
        )


def test_given_reasoning_content_is_left_and_the_content_not_split(qwen3: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = qwen3
    ids = template.encode([user("q"), assistant("a</think>b", reasoning_content="r")])
    assert ids.count(tokenizer.added_tokens["</think>"]) == 1
    assert "<think>\nr\n</think>\n\na</think>b" in tokenizer.decode(ids)


def test_a_template_that_does_not_split_answers_gets_them_whole(qwen2: tuple[Tokenizer, ChatTemplate]) -> None:
    content = "<think>r</think>a"
    assert content in qwen2[1].render([user("q"), assistant(content)])


def test_user_text_is_never_split_at_think(qwen3: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = qwen3
    ids = template.encode([user("a</think>b")])
    assert tokenizer.added_tokens["</think>"] not in ids
    assert "a</think>b" in tokenizer.decode(ids)


@pytest.mark.parametrize(("switch", "ending"), [(None, ""), (True, ""), (False, "<think>\n\n</think>\n\n")])
def test_enable_thinking_reaches_a_template_that_reads_it(
    qwen3: tuple[Tokenizer, ChatTemplate], switch: bool | None, ending: str
) -> None:
    tokenizer, template = qwen3
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n" + ending
    assert template.render([user("q")], enable_thinking=switch) == prompt
    assert template.encode([user("q")], enable_thinking=switch) == tokenizer.encode(prompt)


@pytest.mark.parametrize(
    ("source", "switch", "refused"),
    [("a", True, True), ("a", False, False), ("<think>\n", True, True), ("<think>\n", False, True)],
)
def test_enable_thinking_is_refused_where_the_template_cannot_honour_it(
    make: Any, source: str, switch: bool, refused: bool
) -> None:
    template = make(source)
    if not refused:
        assert template.encode([user("")], enable_thinking=switch) == template.encode([user("")])
        return
    with pytest.raises(RequestError, match="no enable_thinking switch") as caught:
        template.encode([user("")], enable_thinking=switch)
    assert caught.value.param == "chat_template_kwargs.enable_thinking"


def test_tools_are_refused_where_the_template_would_not_show_them(make: Any) -> None:
    template = make("{{ messages[0].content }}")
    assert template.render([user("a")], tools=[]) == "a"
    with pytest.raises(RequestError, match="cannot show tools") as caught:
        template.encode([user("a")], tools=[tool()])
    assert caught.value.param == "tools"


@pytest.mark.parametrize("content", ["a", "", "ends in spaces \n\n", "<|im_end|>", "<tool_call", "x<|im_start|>"])
def test_a_message_to_be_continued_ends_the_prompt(qwen2: tuple[Tokenizer, ChatTemplate], content: str) -> None:
    tokenizer, template = qwen2
    begun = template.render([user("q")])
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert template.render([user("q"), assistant(content)], **options) == begun + content
    ids = template.encode([user("q"), assistant(content)], **options)
    assert ids == template.encode([user("q")]) + tokenizer.encode(content, control_tokens=False)


def test_a_message_that_the_template_does_not_show_cannot_be_continued(make: Any) -> None:
    with pytest.raises(RequestError, match="does not show the last message"):
        make("{{ messages[0].content }}").render([user("q"), assistant("a")], continue_final_message=True)


# -- what a template may do --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{{ raise_exception('No user message: ' + messages[0].content) }}",
            r"messages: No user message: <\|im_end\|>x$",
        ),
        ("{{ raise_exception('long ' * 1000) }}", "long"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[9].content }}", "undefined|no element"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(1000000000) %}{{ i }}{% endfor %}", "[Rr]ange"),
        ("{{ nothing | tojson }}", "not JSON serializable"),
    ],
)
def test_any_failure_of_a_template_is_a_request_error_with_a_short_reason(make: Any, source: str, reason: str) -> None:
    template = make(source)
    for method in (template.render, template.encode):
        with pytest.raises(RequestError, match=reason) as caught:
            method([user("<|im_end|>x")])
        assert caught.value.param == "messages"
        assert len(caught.value.message) < 300


def test_messages_nested_too_deeply_are_a_request_error(make: Any) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="RecursionError"):
        make("{{ messages[0].content }}").encode([user("a", deep=deep)])
    while deep:  # taken apart by hand: freeing it in one go would recurse as deeply
        deep = deep[0]


def test_a_template_that_writes_without_end_is_stopped(make: Any) -> None:
    source = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(RequestError, match=f"longer than {MAX_PROMPT_CHARS} characters"):
        make(source).encode([user("x" * 1000)])


def test_threads_may_share_a_template(qwen2: tuple[Tokenizer, ChatTemplate]) -> None:
    conversations = [normalise_messages(places(f"{token}{i}")["user"][0]) for i in range(8) for token in QWEN2_TOKENS]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(qwen2[1].encode, conversations)) == [qwen2[1].encode(c) for c in conversations]


# -- reading the model folder ------------------------------------------------------------------------


def test_a_folder_without_a_template_gives_none(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path, template=None)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("of no use without a default")
    assert ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder)) is None


def test_t15_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path, template="from the config")
    assert load(folder)[1].render([user("")]) == "from the config"
    (folder / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    assert load(folder)[1].render([user("")]) == "from the file é"


def test_t15_named_templates_are_chosen_by_whether_there_are_tools(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path / "v4", template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [
        {"name": "tool_use", "template": "with {{ tools | length }} tool"},
        {"name": "default", "template": "plain"},
    ]
    write_json(folder / "tokenizer_config.json", config | {"chat_template": named})
    other = write_tokenizer_folder(tmp_path / "v5", layout="v5", template="plain")
    (other / "additional_chat_templates").mkdir()
    (other / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools | length }} tool")
    for template in (load(folder)[1], load(other)[1]):
        assert template.render([user("")]) == template.render([user("")], tools=[]) == "plain"
        assert template.render([user("")], tools=[tool()]) == "with 1 tool"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "chat_template is neither"),
        ([{"name": "default"}], "chat_template is neither"),
        ([{"name": "default", "template": None}], "chat_template is neither"),
        (["default"], "chat_template is neither"),
        ([{"name": "tool_use", "template": "x"}], 'none is named "default"'),
        ("a\n{% if %}", r"tokenizer_config\.json: chat_template is not a Jinja template: line 2"),
        ("{% generation %}x{% endgeneration %}", "is not a Jinja template: line 1"),
    ],
)
def test_a_broken_template_in_the_config_is_refused_at_load(tmp_path: Path, value: object, message: str) -> None:
    folder = write_tokenizer_folder(tmp_path, template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", config | {"chat_template": value})
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{{ \xff }}", "cannot be read"), (b"{{", "is not a Jinja template")]
)
def test_a_broken_template_file_is_refused_at_load(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_tokenizer_folder(tmp_path, layout="v5")
    (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"chat_template\.jinja {message}"):
        load(folder)


# -- the same as transformers ------------------------------------------------------------------------

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user("hi")],
    [user("")],
    [{"role": "system", "content": ""}, user("e\u0301 \u0338 < > | 你好 😀\r\n\n  \t12345 it's")],
    [
        {"role": "system", "content": "s"},
        user("a"),
        assistant("b\n"),
        {"role": "system", "content": "t"},
        user("\n\nc"),
    ],
    [user("a"), assistant("b")],
    [user("a"), assistant(None, tool_calls=[call(city="é<>&'\"\\", n=1.5, none=None)])],
    [user("a"), assistant("text", tool_calls=[call(), call(x=[{"y": "\n"}])]), {"role": "tool", "content": "r"}],
    [user("a"), assistant("", tool_calls=[call()]), *[{"role": "tool", "content": "r"}] * 2, user("b")],
]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", pytest.param("checkpoint", marks=pytest.mark.checkpoint)])
def test_ids_equal_transformers_where_no_control_text_is_involved(
    name: str, qwen2_folder: Path, qwen3_folder: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = {"qwen2": qwen2_folder, "qwen3": qwen3_folder}.get(name) or os.environ.get("CUPYLLM_TEST_CHECKPOINT")
    if not folder:
        pytest.skip("set CUPYLLM_TEST_CHECKPOINT to the folder of a Qwen checkpoint to run this")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    _, ours = load(Path(folder))
    for conversation in CONVERSATIONS:
        for tools in (None, [], [tool(city={"type": "string"})]):
            for generate in (True, False):
                messages = normalise_messages(conversation)
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": generate}
                text = theirs.apply_chat_template(messages, tokenize=False, **options)
                assert ours.render(messages, **options) == text
                assert ours.encode(messages, **options) == theirs.apply_chat_template(
                    messages, return_dict=False, **options
                )


@pytest.mark.checkpoint
def test_a38_holds_for_every_added_token_of_a_real_checkpoint() -> None:
    path = os.environ.get("CUPYLLM_TEST_CHECKPOINT")
    if not path:
        pytest.skip("set CUPYLLM_TEST_CHECKPOINT to the folder of a Qwen checkpoint to run this")
    tokenizer, template = load(Path(path))
    control = set(tokenizer.added_tokens.values())

    def count(text: str) -> dict[str, int]:
        conversations = {place: (normalise_messages(m), tools) for place, (m, tools) in places(text).items()}
        return {p: sum(i in control for i in template.encode(m, tools=t)) for p, (m, t) in conversations.items()}

    expected = count("(harmless)")
    assert all(count(token) == expected for token in tokenizer.added_tokens if token != "</think>")
