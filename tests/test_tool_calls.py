"""Finding calls in text: every cut of a text gives the same message, and none of the text is lost."""

from __future__ import annotations

import itertools
import json
import os
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyllm.chat_template import ChatTemplate
from cupyllm.message_parts import CallArguments, CallBegin, CallEnd, Message
from cupyllm.messages import normalise_messages
from cupyllm.reasoning import AnswerDecoder
from cupyllm.tokenizer import Tokenizer
from cupyllm.tool_calls import CLOSING, MAX_HEADER_CHARACTERS, OPENING, ToolCallParser, parse_tool_calls
from tests.qwen_tokenizer import write_tokenizer_folder

A35 = {"text": 'He said "</tool_call>"\n<tool_call>\\ \U0001fae0 {[}]', "b": [{"c": "}}\n</tool_call>"}]}


def written(name: str, arguments: Any, **options: Any) -> str:
    """A call as a Qwen model writes it."""
    text = json.dumps(arguments, ensure_ascii=False, **options)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def stream(pieces: list[str]) -> tuple[Message, list[Any]]:
    """The message made of a text that comes in pieces, and its parts in order."""
    parser, parts = ToolCallParser(), []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    message = Message()
    message.add(parts)
    return message, parts


def shape(message: Message) -> tuple[str, list[tuple[str, str]]]:
    """What does not depend on random ids."""
    return message.content, [(call.name, call.arguments) for call in message.tool_calls]


def cut(text: str, points: list[int]) -> list[str]:
    points = [0, *sorted(points), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(points)]


def test_a35_two_calls_at_every_cut() -> None:
    text = written("f", A35) + "\n" + written("g", {})
    expected = ("", [("f", json.dumps(A35, ensure_ascii=False)), ("g", "{}")])
    for point in range(len(text) + 1):
        message, parts = stream(cut(text, [point]))
        assert shape(message) == expected
        assert [part.index for part in parts if isinstance(part, CallBegin)] == [0, 1]
        assert [part.index for part in parts if isinstance(part, CallEnd)] == [0, 1]
    message, _ = stream(list(text))
    assert shape(message) == expected
    assert json.loads(message.tool_calls[0].arguments) == A35
    assert len({call.id for call in message.tool_calls}) == 2
    assert shape(parse_tool_calls(text)) == expected


def random_value(rng: random.Random, depth: int = 0) -> Any:
    texts = [*("</tool_call>", "<tool_call>", '"', "\\", "\n", "\t", "}", "{", "[", "]", "<", "é", "\U0001fae0", "龘")]
    texts += ["</tool", "\\u0041", "\u2028", "\x00", "word", " ", "<think>", "</think>", "<|im_end|>", "e\u0301"]
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return rng.choice([None, True, False, 0, -1, 2**70, 1.5, -1e-300, 1e300])
    if kind < 6:
        return "".join(rng.choices(texts, k=rng.randrange(12)))
    if kind == 6:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return random_object(rng, depth + 1)


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {str(random_value(rng, 9)): random_value(rng, depth) for _ in range(rng.randrange(4))}


def test_bar_24_two_thousand_random_arguments_streamed_plain_and_from_history() -> None:
    rng = random.Random(24)
    for number in range(2000):
        arguments = random_object(rng)
        if number % 200 == 0:
            arguments["long"] = "".join(str(random_value(rng, 9)) for _ in range(5000))[:20_000]
        options = {"ensure_ascii": rng.random() < 0.2, "indent": rng.choice([None, None, 2])}
        raw = json.dumps(arguments, **options)
        text = f'<tool_call>\n{{"name": "f", "arguments": {raw}}}\n</tool_call>'
        expected = ("", [("f", raw)])
        assert shape(parse_tool_calls(text)) == expected
        for point in rng.sample(range(len(text)), 20):
            assert shape(stream(cut(text, [point]))[0]) == expected
        assert shape(stream(cut(text, [rng.randrange(len(text)) for _ in range(20)]))[0]) == expected
        call = {"type": "function", "function": {"name": "f", "arguments": raw}}
        (message,) = normalise_messages([{"role": "assistant", "tool_calls": [call]}])
        assert message["tool_calls"][0]["function"]["arguments"] == arguments == json.loads(raw)
        short = text[: rng.randrange(text.index(raw) + 1, text.index(raw) + len(raw))]
        message, parts = stream([short])
        assert shape(message) == ("", [("f", short[text.index(raw) :])]), "cut off, it is what there is"
        assert not any(isinstance(part, CallEnd) for part in parts)


@pytest.mark.parametrize("name", ["small", pytest.param("checkpoint", marks=pytest.mark.checkpoint)])
def test_bar_24_arguments_survive_tokens_and_the_template(name: str, tmp_path: Path) -> None:
    """What the model wrote token by token comes out of the parser, and goes back into the prompt unchanged."""
    folder = write_tokenizer_folder(tmp_path) if name == "small" else os.environ.get("CUPYLLM_TEST_CHECKPOINT")
    if not folder:
        pytest.skip("set CUPYLLM_TEST_CHECKPOINT to the folder of a Qwen checkpoint to run this")
    tokenizer = Tokenizer.from_folder(Path(folder))
    template = ChatTemplate.from_folder(Path(folder), tokenizer)
    assert template is not None
    rng = random.Random(7)
    for _ in range(200):
        raw = unicodedata.normalize("NFC", json.dumps(random_object(rng), ensure_ascii=False))
        head, tail = '\n{"name": "f", "arguments": ', "}\n"
        spelled = [tokenizer.encode(text, control_tokens=False) for text in (head, raw, tail)]
        begin, end = (tokenizer.added_tokens[mark] for mark in (OPENING, CLOSING))
        decoder = AnswerDecoder(tokenizer)
        ids = [begin, *itertools.chain(*spelled), end]
        message, _ = stream([*(decoder.push(token_id).content for token_id in ids), decoder.finish().content])
        assert shape(message) == ("", [("f", raw)])
        call = {"type": "function", "function": {"name": "f", "arguments": message.tool_calls[0].arguments}}
        history = normalise_messages([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}])
        prompt = template.encode(history, add_generation_prompt=False)
        assert prompt.count(begin) == prompt.count(end) == 1
        assert OPENING + head + raw + tail + CLOSING in tokenizer.decode(prompt)


PIECES = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "</", "\n", " ", "{", "}", '{"name": "f", "arguments": ', '"'),
    *('"name"', ":", ",", '"f"', '"arguments"', "[", "]", "\\", "text", "é", '{"name": "g"}', "<", "{}", "\\\\"),
]


@settings(deadline=None, max_examples=400)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), cuts=st.lists(st.integers(0, 400), max_size=12))
@example(pieces=["a ", "<tool_call>", " ", "<tool_call>"], cuts=[1, 2, 3])
def test_any_text_gives_the_same_message_at_any_cut(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    whole = shape(parse_tool_calls(text))
    assert shape(stream(cut(text, [min(point, len(text)) for point in cuts]))[0]) == whole
    assert shape(stream(list(text))[0]) == whole


@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from([*PIECES, "more text"]), max_size=20))
def test_text_without_a_call_is_content_to_the_last_character(pieces: list[str]) -> None:
    text = "".join(pieces)
    message = parse_tool_calls(text)
    if not message.tool_calls:
        assert message.content == text


CALL = written("f", {"a": 1})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Let me look.\n" + CALL, "Let me look.", 1),
        ("Let me look.\n\n" + CALL + "\n" + CALL + "\n", "Let me look.", 2),
        (CALL + "\nDone.\n", "Done.", 1),
        ("A" + CALL + "\nB", "A\nB", 1),
        (CALL + CALL + " \n ", "", 2),
        ("\n\n" + CALL, "", 1),
        ("  plain \n", "  plain \n", 0),
        ("", "", 0),
        (" \n", " \n", 0),
    ],
)
def test_white_space_beside_calls_is_dropped_and_other_text_kept(text: str, content: str, calls: int) -> None:
    assert shape(parse_tool_calls(text)) == (content, [("f", '{"a": 1}')] * calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n",
        "a\n<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "text"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "two words", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "' + "x" * 65 + '", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>',
        "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>",
        '<tool_call>\n[{"name": "f", "arguments": {}}]\n</tool_call>',
        '<tool_call>\n{"name": "f", "argum',
        "<tool_call>" + " " * (MAX_HEADER_CHARACTERS + 1) + '{"name": "f", "arguments": {}}',
        "no <tool_calls> here",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content_as_it_stands(text: str) -> None:
    assert shape(parse_tool_calls(text)) == (text, [])
    assert shape(stream(list(text))[0]) == (text, [])
    assert shape(parse_tool_calls(text + CALL)) == (text.rstrip(), [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("arguments", "tail", "content"),
    [
        ("{}", "}\n</tool_call>", ""),
        ("{}", "\n</tool_call>", ""),
        ("{}", "}}}\n</tool_call>", ""),
        ("{}", "}", ""),
        ("{}", "}\n</tool_c", ""),
        ("{}", "} and more", "and more"),
        ("{}", ', "id": 7}', ', "id": 7}'),
        ("{'a': 1}", "}\n</tool_call>", ""),
        ('{"a": [1}}', "\n</tool_call>", ""),
        ('{"a": 1\n', "</tool_call>\nmore", "more"),
        ('{"a": <b>}', "}</tool_call>", ""),
        ('{"never closed}}\n</tool_call>', "", ""),
        ('{"a": "\\', "", ""),
        ('{"a": 1, </tool', "", ""),
    ],
)
def test_broken_arguments_are_given_as_they_stand(arguments: str, tail: str, content: str) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": ' + arguments + tail
    assert shape(parse_tool_calls(text)) == shape(stream(list(text))[0]) == (content, [("f", arguments)])


def test_a_name_alone_is_a_call_without_arguments() -> None:
    assert shape(parse_tool_calls('<tool_call>{"name": "now" }</tool_call>')) == ("", [("now", "{}")])


def test_only_what_may_be_the_start_of_a_call_is_held_back() -> None:
    text, parser = "a < b <tools>, <tool_call", ToolCallParser()
    shown = ["".join(part.text for part in parser.push(character)) for character in text]
    for number in range(1, len(text) + 1):
        so_far = "".join(shown[:number])
        held = text[len(so_far) : number]
        assert text.startswith(so_far)
        assert "<tool_call>".startswith(held.lstrip()), f"{held!r} is held back"


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ToolCallParser()
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == []
    begin, first = parser.push('{"ci')
    assert (begin.name, first) == ("f", CallArguments(0, '{"ci'))
    for character in 'ty": "a</tool_call>\\"':
        assert parser.push(character) == [CallArguments(0, character)]
    assert parser.push('"}') == [CallArguments(0, '"}'), CallEnd(0)]


@pytest.mark.parametrize(
    "repeated", ["<tool_call>", "<tool_call>{", '<tool_call>{"name":"f"', "\n", " <", "<tool_call>{\n"]
)
def test_a_long_text_of_beginnings_is_content(repeated: str) -> None:
    text = repeated * 20_000
    assert parse_tool_calls(text).content == text
