"""Structured output: whatever is written along a guide is valid, by judges of their own (jsonschema, re)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyllm.errors import DeadEndError, RequestError
from cupyllm.structured.compiler import CACHE_SIZE, GuideCompiler
from cupyllm.structured.grammar import (
    Grammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    user_grammar,
)
from cupyllm.structured.tool_calls import tool_call_guide
from cupyllm.tool_calls import parse_tool_calls
from tests.qwen_tokenizer import write_tokenizer_folder
from tests.structured_case import accepts, allowed, demo_compiler, make_compiler, write_something

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
# name -> (schema, values that are valid, values that are not)
SCHEMAS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "object": (POINT, [{"x": 1, "y": -20}], [{"x": 1}, {"x": 1, "y": 2, "z": 3}, {"x": "1", "y": 2}, [1, 2]]),
    "optional key": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}},
            "additionalProperties": False,
        },
        [{}, {"a": None}, {"b": True}, {"a": None, "b": False}],
        [{"a": 1}, {"c": 1}],
    ),
    "other keys": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
        [{"a": 1, "other": True}, {"é": False}],
        [{"a": True}, {"other": 1}],
    ),
    "keys by pattern": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"n_a": 1, "n_b": 2}],
        [{"n_a": "1"}, {"a": 1}],
    ),
    "number of keys": (
        {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "null"}},
        [{"a": None}, {"a": None, "b": None}],
        [{}, {"a": None, "b": None, "c": None}],
    ),
    "enum": ({"enum": ["a", 1, None, {"x": [1]}, "日本"]}, ["a", 1, None, {"x": [1]}, "日本"], ["b", 2, {"x": [2]}]),
    "const": ({"const": {"kind": "fixed"}}, [{"kind": "fixed"}], [{"kind": "free"}, {}]),
    "nested arrays": (
        {"type": "array", "items": {"type": "array", "items": POINT, "maxItems": 2}, "minItems": 1, "maxItems": 3},
        [[[]], [[{"x": 1, "y": 2}], []]],
        [[], [[1]], [[], [], [], []]],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 2},
        [["a", 1]],
        [["a"], [1, "a"], ["a", 1, 2]],
    ),
    "tuple of draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "string"}, {"type": "integer"}],
            "additionalItems": False,
        },
        [["a", 1], ["a"]],
        [[1], ["a", 1, 2]],
    ),
    "definitions": (
        {
            "$defs": {"point": POINT, "line": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2}},
            "$ref": "#/$defs/line",
        },
        [[], [{"x": 0, "y": 0}]],
        [[1], {"x": 0, "y": 0}],
    ),
    "recursion": (
        {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                    "required": ["left"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/tree",
        },
        [{"left": None}, {"left": {"left": {"left": None}}}],
        [{}, {"left": {}}, None],
    ),
    "any of": (
        {"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string", "maxLength": 2}, {"type": "null"}]},
        [10, "ab", None],
        [9, "abc", True],
    ),
    "one of": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"], "additionalProperties": False}
                for k in ("a", "b")
            ],
            "discriminator": {"propertyName": "k"},
        },
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}, {}],
    ),
    "all of": (
        {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
        [3, 4, 5],
        [2, 6, "4"],
    ),
    "integer bounds": ({"type": "integer", "minimum": -5, "exclusiveMaximum": 120}, [-5, 0, 119], [-6, 120, 1.5]),
    "number bounds": ({"type": "number", "exclusiveMinimum": 0, "maximum": 2.5}, [0.001, 1, 2.5], [0, 2.51, -1]),
    "multiples": ({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9}, [0, 0.25, 3.75, 9], [0.3, 9.25]),
    "string length": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "日本語", "😀😀😀😀"], ["a", "abcde"]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"}, ["AB-123"], ["AB-12", "xAB-123", "ab-123"]),
    "pattern within": ({"type": "string", "pattern": "b\\d", "maxLength": 6}, ["ab1c", "b2"], ["ab", "b"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "today"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "escapes": ({"type": "object", "properties": {'a "b"\n\\': {"type": "null"}}}, [{'a "b"\n\\': None}], []),
    "unicode key": (
        {"type": "object", "properties": {"größe": {"enum": ["klein", "groß"]}}, "required": ["größe"]},
        [{"größe": "groß"}],
        [{"größe": "gross"}],
    ),
    "annotations": (
        {"type": "boolean", "title": "t", "description": "d", "default": True, "examples": [1], "x-order": 3},
        [True, False],
        ["true"],
    ),
    "anything": ({}, [None, 1, "a", [{}]], []),
}


def judge(schema: Any) -> jsonschema.protocols.Validator:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> GuideCompiler:
    """Over a vocabulary that has Qwen's added tokens."""
    return make_compiler(write_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_along_a_schema_is_valid_by_it(name: str) -> None:
    schema, valid, invalid = SCHEMAS[name]
    compiler, validator = demo_compiler(), judge(schema)
    guide = compiler.compile(json_schema_grammar(schema))
    complete = 0
    for seed in range(8):
        text, ended = write_something(compiler, guide, seed)
        complete += ended
        if ended:
            validator.validate(json.loads(text))
    assert complete >= 4, "too few answers ended for this test to say anything"
    for value in valid:
        assert validator.is_valid(value)
        for written in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
            if "\\u" not in written:  # characters are written as themselves, not as escapes
                assert accepts(compiler, guide, written), written
    for value in invalid:
        assert not validator.is_valid(value)
        assert not accepts(compiler, guide, json.dumps(value, ensure_ascii=False)), value


def schemas(depth: int = 2) -> st.SearchStrategy[Any]:
    """JSON schemas that can be satisfied."""
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 100))
    leaves = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 5}]),
        st.lists(st.one_of(st.text(max_size=4), st.integers(-9, 9)), min_size=1, max_size=4).map(lambda v: {"enum": v}),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        bounds.map(lambda b: {"type": "number", "minimum": b[0] / 4, "maximum": (b[0] + b[1]) / 4}),
    )
    if depth == 0:
        return leaves
    inner = schemas(depth - 1)
    return st.one_of(
        leaves,
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3}),
        st.dictionaries(st.text(max_size=4), st.tuples(inner, st.booleans()), max_size=4).map(_object_schema),
    )


def _object_schema(keys: dict[str, tuple[Any, bool]]) -> Any:
    return {
        "type": "object",
        "properties": {name: schema for name, (schema, _) in keys.items()},
        "required": [name for name, (_, required) in keys.items() if required],
        "additionalProperties": False,
    }


@settings(max_examples=40, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_any_schema_is_kept(schema: Any, seed: int) -> None:
    compiler = demo_compiler()
    text, ended = write_something(compiler, compiler.compile(json_schema_grammar(schema)), seed)
    if ended:
        judge(schema).validate(json.loads(text))


def test_a_json_object_is_one_object() -> None:
    compiler = demo_compiler()
    guide = compiler.compile(json_object_grammar())
    assert accepts(compiler, guide, '{"a": [1, 2.5e3, {"b": null}], "c": "\\u0001\\n"}')
    for text in ("[1]", '{"a": 1} {}', '{"a": 01}', "{'a': 1}", "{", '{"a": 1,}', 'x{"a": 1}'):
        assert not accepts(compiler, guide, text), text
    values = [json.loads(text) for text, ended in (write_something(compiler, guide, s) for s in range(12)) if ended]
    assert len(values) >= 6
    assert all(isinstance(value, dict) for value in values)
    json.dumps(values, ensure_ascii=False).encode()  # no half of a surrogate pair


def test_blanks_in_json_are_bounded() -> None:
    compiler = demo_compiler()
    guide = compiler.compile(json_object_grammar())
    for blanks in ("", " ", "\n", "\r\n\t\t", "\n" + " " * 32):
        assert accepts(
            compiler, guide, f'{{{blanks}"a"{blanks}:{blanks}[{blanks}1{blanks},{blanks}2{blanks}]{blanks}}}'
        )
    for blanks in ("  ", "\n\n", "\n" + " " * 33, "\t", "\u00a0"):
        assert not accepts(compiler, guide, f"{{{blanks}}}")


@pytest.mark.parametrize(
    ("regex", "matching", "other"),
    [
        (r"[a-c]+\d{2}", ["a12", "abcabc00"], ["a1", "d12", "a123"]),
        (r"^(yes|no)$", ["yes", "no"], ["yesno", "maybe"]),
        (r"a/b\/c", ["a/b/c"], ["a\\/b/c"]),
        (r"[/]{2}", ["//"], ["/"]),
        ("line\nnext", ["line\nnext"], ["line next"]),
        (r"[^\s]+é?", ["日本é", "x"], ["a b", ""]),
        (r"(?i)ok|\\", ["OK", "oK", "\\"], ["o"]),
    ],
)
def test_a_regex_is_matched_from_beginning_to_end(regex: str, matching: list[str], other: list[str]) -> None:
    compiler = demo_compiler()
    guide = compiler.compile(regex_grammar(regex))
    for text in matching:
        assert re.fullmatch(regex, text)
        assert accepts(compiler, guide, text), text
    for text in other:
        assert not re.fullmatch(regex, text)
        assert not accepts(compiler, guide, text), text
    for seed in range(5):
        text, ended = write_something(compiler, guide, seed, most=400)
        assert not ended or re.fullmatch(regex, text)


def test_a_choice_is_one_of_the_texts() -> None:
    choices = ["yes", "yes, certainly", 'say "no"\\', "日本 😀", "two\nlines\t", "/slash/", "\x7f\x00", "<|im_end|>"]
    compiler = demo_compiler()
    guide = compiler.compile(choice_grammar(choices))
    assert all(accepts(compiler, guide, choice) for choice in choices)
    assert not any(accepts(compiler, guide, text) for text in ("", "ye", "no", "yes, certainly not", "yesyes"))
    assert {write_something(compiler, guide, seed) for seed in range(20)} <= {(choice, True) for choice in choices}


@pytest.mark.parametrize(
    "text",
    [
        'start: "(" sum ")"\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/',
        '%llguidance {}\n// a comment\nstart: "(" sum ")"\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]{1,3}/',
        'root ::= "(" sum ")"\nsum ::= num ("+" num)*\nnum ::= [0-9] [0-9]? [0-9]?',
    ],
)
def test_a_grammar_in_lark_or_gbnf_is_kept(text: str) -> None:
    compiler = demo_compiler()
    guide = compiler.compile(user_grammar(text))
    assert accepts(compiler, guide, "(1+22+333)")
    assert not any(accepts(compiler, guide, wrong) for wrong in ("(1+)", "1+2", "(1234)", "()", "(1)x"))
    for seed in range(5):
        written, ended = write_something(compiler, guide, seed, most=300)
        assert not ended or re.fullmatch(r"\(\d{1,3}(\+\d{1,3})*\)", written)


def test_a_grammar_may_name_an_added_token(qwen: GuideCompiler) -> None:
    guide = qwen.compile(user_grammar('start: <tool_call> "x"'))
    assert allowed(guide.start(), qwen.tokenizer) == [qwen.tokenizer.added_tokens["<tool_call>"]]


def test_text_never_becomes_an_added_token(qwen: GuideCompiler) -> None:
    added = set(qwen.tokenizer.added_tokens.values())
    for grammar in (
        regex_grammar(r"(?s:.*)"),
        choice_grammar(["<tool_call>"]),
        json_schema_grammar({"type": "string"}),
    ):
        one = qwen.compile(grammar).start()
        for token_id in qwen.tokenizer.encode('"' if "json" in grammar.text else "<", control_tokens=False):
            one.advance(token_id)
        ends = {qwen.tokenizer.added_tokens[text] for text in ("<|im_end|>", "<|endoftext|>")}
        assert set(allowed(one, qwen.tokenizer)) & added <= ends


def test_after_the_end_only_end_tokens_follow() -> None:
    """A request with ignore_eos goes on after an end token: it gets end tokens, and no error."""
    compiler = demo_compiler()
    ends = sorted(compiler.tokenizer.added_tokens[text] for text in ("<|im_end|>", "<|endoftext|>"))
    for grammar, text in ((regex_grammar("ab"), "ab"), (regex_grammar("a*"), "")):
        one = compiler.compile(grammar).start()
        for token_id in compiler.tokenizer.encode(text):
            one.advance(token_id)
        for end in ends * 2:
            assert end in allowed(one, compiler.tokenizer)
            one.advance(end)
            assert allowed(one, compiler.tokenizer) == ends


def test_a_grammar_that_leads_nowhere_says_so_there() -> None:
    """An end token would make the text look complete."""
    compiler = demo_compiler()
    one = compiler.compile(user_grammar("start: /[0-9]{40}/ never\nnever: never")).start()
    (digit,) = compiler.tokenizer.encode("7")
    for _ in range(39):
        assert digit in allowed(one, compiler.tokenizer)
        one.advance(digit)
    one.advance(digit)
    for _ in range(2):  # the sampling asks, and whoever wants to know why it found no token
        with pytest.raises(DeadEndError, match="grammar led the answer to a dead end") as caught:
            allowed(one, compiler.tokenizer)
    assert (caught.value.param, caught.value.code) == ("grammar", "dead_end")


REFUSED: list[tuple[Any, Any, str]] = [
    (json_schema_grammar, {"not": {"type": "string"}}, "'not'"),
    (json_schema_grammar, {"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    (json_schema_grammar, {"properties": {"a": {"items": {"if": {}}}}}, r"'if' .*properties\.a\.items"),
    (json_schema_grammar, {"type": "string", "nullable": True}, "'nullable'"),
    (json_schema_grammar, {"type": "object", "dependentRequired": {}}, "'dependentRequired'"),
    (json_schema_grammar, {"type": "string", "x-guidance": {"lenient": True}}, "'x-guidance'"),
    (json_schema_grammar, {"type": "string", "format": "iban"}, "iban"),
    (json_schema_grammar, {"$ref": "http://example.com/schema.json"}, "example.com"),
    (json_schema_grammar, {"$ref": "file:///etc/passwd"}, "passwd"),
    (json_schema_grammar, {"$ref": "#/$defs/absent"}, "absent"),
    (json_schema_grammar, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text can satisfy"),
    (json_schema_grammar, {"type": "strin"}, "strin"),
    (json_schema_grammar, {"type": "integer", "minimum": 5, "maximum": 3}, "greater than maximum"),
    (json_schema_grammar, {"type": "integer", "minimum": 5, "exclusiveMinimum": True}, "exclusiveMinimum must be"),
    (json_schema_grammar, {"enum": []}, "Unsatisfiable"),
    (json_schema_grammar, {"type": "object", "properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
    (json_schema_grammar, True, "an object"),
    (json_schema_grammar, {"prefixItems": [{}], "additionalItems": False}, "prefixItems"),
    (json_schema_grammar, {"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf"),
    (json_schema_grammar, {"pattern": "(?=a)b"}, "look-ahead"),
    (json_schema_grammar, {"pattern": "(a"}, "unclosed group"),
    (json_schema_grammar, {"const": "\ud800"}, "hex escape"),
    (json_schema_grammar, {"minimum": float("nan")}, "JSON"),
    (json_schema_grammar, ["type"], "an object"),
    (json_schema_grammar, "object", "an object"),
    (regex_grammar, "(a", "unclosed group"),
    (regex_grammar, r"(a)\1", "backreferences"),
    (regex_grammar, r"\bword", "WordUnicode|look"),
    (regex_grammar, "", "empty"),
    (regex_grammar, 5, "text"),
    (regex_grammar, "a\ud800", "surrogate"),
    (choice_grammar, [], "1 to"),
    (choice_grammar, "yes", "list"),
    (choice_grammar, ["yes", 1], "text"),
    (choice_grammar, ["yes", ""], "empty"),
    (user_grammar, "start: other", "other"),
    (user_grammar, "beginning: \"a\"", "start"),
    (user_grammar, "a b c", "Expected"),
    (user_grammar, "root ::= other", "other"),
    (user_grammar, 'start: "a"\n%llguidance {"no_forcing": false}', "options"),
    (user_grammar, "start: <[2047000]>", "range"),
    (user_grammar, "start: <|nosuchtoken|>", "nosuchtoken"),
    (user_grammar, "start: start", "no text can satisfy"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "spec", "told"), REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(make: Any, spec: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        demo_compiler().compile(make(spec, param="the_field"))
    assert caught.value.param == "the_field"
    assert caught.value.message.startswith("the_field")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


def nested(count: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def multiples_of(*factors: int) -> Any:
    return {"allOf": [{"type": "integer", "multipleOf": factor} for factor in factors]}


def doubling(count: int) -> Any:
    rooms = {f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**rooms, f"a{count}": {"type": "string"}}}


def doubling_rules(count: int, ending: str) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1} {ending}\n" for i in range(count)) + f'r{count}: "a"'


MALICIOUS: dict[str, tuple[Any, Any]] = {
    "deep": (json_schema_grammar, nested(20_000)),
    "deep value": (json_schema_grammar, {"const": json.loads("[" * 900 + "]" * 900)}),
    "huge enum": (json_schema_grammar, {"enum": [f"value {i}" for i in range(100_000)]}),
    "long value": (json_schema_grammar, {"const": "x" * 100_000}),
    "many keys": (json_schema_grammar, {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}),
    "product of options": (
        json_schema_grammar,
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(8)]} for i in range(8)]},
    ),
    "intersected multiples": (json_schema_grammar, multiples_of(101, 103, 107, 109)),
    "large multiple": (json_schema_grammar, multiples_of(9973)),
    "huge multiple": (json_schema_grammar, {"type": "number", "multipleOf": 1e300}),
    "tiny multiple": (json_schema_grammar, {"type": "number", "multipleOf": 1e-300}),
    "huge bounds": (json_schema_grammar, {"type": "integer", "minimum": -(10**400), "maximum": 10**400}),
    "huge length": (json_schema_grammar, {"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "huge array": (json_schema_grammar, {"type": "array", "minItems": 10**6, "maxItems": 10**9}),
    "doubling references": (json_schema_grammar, doubling(40)),
    "pattern with exponential states": (json_schema_grammar, {"type": "string", "pattern": "(a|b)*a(a|b){20}"}),
    "nested repetition": (regex_grammar, "(a{1000}){1000}"),
    "late repetition": (regex_grammar, "[a-z]{5}((a{100}){100}){100}"),
    "exponential backtracking": (regex_grammar, "(x+x+)+y"),
    "exponential states": (regex_grammar, "(.*a.{100})"),
    "deep groups": (regex_grammar, "(" * 20_000 + "a" + ")" * 20_000),
    "long alternation": (regex_grammar, "|".join("a" * i for i in range(1, 350))),
    "unicode classes": (regex_grammar, r"[\p{L}\p{N}]{1,1000}"),
    "too long": (regex_grammar, "a" * 100_000),
    "many choices": (choice_grammar, [f"choice {i}" for i in range(4096)]),
    "deep rules": (user_grammar, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "deep rules of gbnf": (user_grammar, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "doubling rules": (user_grammar, doubling_rules(40, "")),
    "empty rules": (user_grammar, doubling_rules(14, "|")),
    "ambiguous rules": (user_grammar, 'start: e\ne: e e | "a" |'),
    "negations": (user_grammar, "start: A\nA: ~(~(/.*a.{12}/) & /.*b.{12}/) & /(.*c.{12})/"),
    "repeated rules": (user_grammar, 'start: ("a"~1..100000)~1..100000'),
}  # fmt: skip


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_spec_is_refused_or_can_be_followed(name: str) -> None:
    """No crash, no endless compiling, and no step that allows nothing before the output is complete."""
    make, spec = MALICIOUS[name]
    compiler = demo_compiler()
    with contextlib.suppress(RequestError):
        write_something(compiler, compiler.compile(make(spec)), 0, most=60)


def test_a_grammar_is_compiled_once() -> None:
    compiler = make_compiler()
    first = compiler.compile(json_schema_grammar(POINT, param="response_format"))
    again = compiler.compile(json_schema_grammar(json.loads(json.dumps(POINT)), param="guided_json"))
    assert again.matcher is first.matcher
    for number in range(CACHE_SIZE):
        compiler.compile(choice_grammar([str(number)]))
    assert compiler.compile(json_schema_grammar(POINT)).matcher is not first.matcher, "the cache does not forget"


def test_an_answer_does_not_change_the_next() -> None:
    compiler = demo_compiler()
    guide = compiler.compile(regex_grammar("ab|cd"))
    first, second = guide.start(), guide.start()
    begin = allowed(second, compiler.tokenizer)
    first.advance(compiler.tokenizer.encode("a")[0])
    assert allowed(second, compiler.tokenizer) == begin == allowed(guide.start(), compiler.tokenizer)
    assert allowed(first, compiler.tokenizer) != begin


def test_many_threads_may_compile_and_start() -> None:
    compiler = make_compiler()
    texts: list[tuple[int, str]] = []

    def work(number: int) -> None:
        for turn in range(5):
            guide = compiler.compile(choice_grammar([f"answer {turn}", f"other {number % 3}"]))
            texts.append((turn, write_something(compiler, guide, number)[0]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 40
    assert all(text == f"answer {turn}" or re.fullmatch("other [012]", text) for turn, text in texts)


def test_without_the_library_the_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("llguidance", "llguidance.gbnf_to_lark"):
        monkeypatch.setitem(sys.modules, module, None)
    for grammar in (regex_grammar("a"), json_object_grammar()):
        with pytest.raises(RequestError, match=r"pip install 'cupyllm\[structured\]'"):
            make_compiler().compile(grammar)
    with pytest.raises(RequestError, match=r"pip install 'cupyllm\[structured\]'"):
        user_grammar('root ::= "a"')


def test_a_model_without_an_end_token_is_refused() -> None:
    tokenizer = demo_compiler().tokenizer
    for ends in ([], [tokenizer.num_tokens]):
        with pytest.raises(RequestError, match="no end token"):
            GuideCompiler(tokenizer, ends, vocab_limit=tokenizer.num_tokens).compile(regex_grammar("a"))


def test_ids_without_a_token_are_never_allowed() -> None:
    tokenizer = demo_compiler().tokenizer
    limit = tokenizer.num_tokens - 1  # a model that computes fewer logits than there are tokens
    compiler = GuideCompiler(tokenizer, [limit - 1], vocab_limit=limit)
    words = np.zeros(-(-limit // 32), np.uint32)
    assert compiler.compile(user_grammar("start: <[*]>")).start().allow(words)
    assert np.unpackbits(words.view(np.uint8), bitorder="little")[limit:].sum() == 0


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "São Paulo"]}, "days": {"$ref": "#/$defs/days"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
            },
        },
    },
    {"type": "function", "function": {"name": "get", "parameters": {"properties": {"v": {"type": "null"}}}}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_calls_written_along_their_guide_are_valid(qwen: GuideCompiler, parallel: bool, added: bool) -> None:
    compiler = qwen if added else demo_compiler()
    guide = tool_call_guide(compiler, TOOLS, parallel=parallel)
    parameters = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    names, most = set(), 0
    for seed in range(30):
        text, ended = write_something(compiler, guide, seed)
        if not ended:
            continue
        message = parse_tool_calls(text)
        assert message.tool_calls
        assert not message.content.strip()
        for call in message.tool_calls:
            judge(parameters[call.name]).validate(json.loads(call.arguments))
            assert isinstance(json.loads(call.arguments), dict)
            names.add(call.name)
        most = max(most, len(message.tool_calls))
    assert names == set(parameters)
    assert most > 1 if parallel else most == 1


def test_a_call_begins_with_the_added_token(qwen: GuideCompiler) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for parallel in (True, False):
        guide = tool_call_guide(qwen, TOOLS, parallel=parallel)
        assert allowed(guide.start(), qwen.tokenizer) == [qwen.tokenizer.added_tokens["<tool_call>"]]
        assert accepts(qwen, guide, call, control_tokens=True)
        assert accepts(qwen, guide, f"{call}\n{call}", control_tokens=True) is parallel


def test_only_a_strict_tool_is_refused_for_a_keyword() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "dependentRequired": {}}}}
    compiler = demo_compiler()
    assert accepts(
        compiler, tool_call_guide(compiler, [tool]), '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )
    tool["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(RequestError, match="dependentRequired") as caught:
        tool_call_guide(compiler, [tool])
    assert caught.value.param == "tools[0].function.parameters"
    with pytest.raises(RequestError, match="must hold a tool"):
        tool_call_guide(compiler, [])


@pytest.mark.checkpoint
def test_the_vocabulary_of_a_real_model() -> None:
    path = os.environ.get("CUPYLLM_TEST_CHECKPOINT")
    if path is None:
        pytest.skip("set CUPYLLM_TEST_CHECKPOINT to the folder of a Qwen checkpoint to run this")
    compiler = make_compiler(Path(path))
    schema = SCHEMAS["definitions"][0]
    guide = compiler.compile(json_schema_grammar(schema))
    assert accepts(compiler, guide, '[{"x": 1, "y": 22}, {"x": -3, "y": 0}]')
    for seed in range(3):
        text, ended = write_something(compiler, guide, seed)
        assert not ended or judge(schema).is_valid(json.loads(text))
    text, ended = write_something(compiler, tool_call_guide(compiler, TOOLS), 0)
    assert not ended or parse_tool_calls(text).tool_calls


def test_a_grammar_of_the_same_text_names_its_own_field() -> None:
    compiler = demo_compiler()
    for param in ("guided_regex", "regex"):
        with pytest.raises(RequestError) as caught:
            compiler.compile(Grammar(regex_grammar("(a").text, param))
        assert caught.value.param == param
