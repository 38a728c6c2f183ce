"""Bodies that must be refused with the error object, and nothing worse; and the limits at, below and above."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.api.live_server import MAX_MODEL_LEN, MESSAGES, LiveServer, raw_connection, raw_request

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
V = 350  # any id from here on is beyond the test model's vocabulary


def assert_error(status: int, body: dict[str, Any], *, expected: int = 400, param: str | None = "?") -> str:
    assert status == expected, body
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    assert error["message"]
    for leak in ("Traceback", "pydantic", "0x", "site-packages", "<class"):
        assert leak not in error["message"]
    if param != "?":
        assert error["param"] == param, body
    return error["message"]


def refuse(server: LiveServer, path: str, *, status: int = 400, param: str | None = "?", **fields: Any) -> str:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
    response = server.post(path, base | fields)
    return assert_error(response.status_code, response.json(), expected=status, param=param)


TOOL: Any = {"type": "function", "function": {"name": "f"}}


def tool(**function: Any) -> Any:
    return TOOL | {"function": function}


BAD_FIELDS = {
    "temperature": ["1", True, [1], -0.1, 2.1, 10**400],
    "top_p": ["1", 0, -1, 1.0001, False],
    "min_p": [-0.1, 1.1, "0"],
    "repetition_penalty": [0, -1, 11, "1"],
    "top_k": [-2, 1.5, "1", True, 2**31, 10**30],
    "seed": ["x", 1.5, True, 2**64, -(2**63) - 1, 10**20],
    "max_tokens": [-1, "5", 1.5, True],
    "max_completion_tokens": [-1, "5", 1.5, True],
    "min_tokens": [-1, "5", 1.5, True, 10**30],
    "stop": ["", [""], 5, [5], {"a": 1}, ["a"] * 5, "x" * 257],
    "stop_token_ids": [[-1], [V], [2**63], ["1"], [True], 5, [0] * 129],
    "stream": ["true", 1, 0],
    "ignore_eos": ["true", 1],
    "return_token_ids": [1],
    "n": [0, -1, 17, 10**30, "1", True, 1.5],
    "use_beam_search": ["true", 1, 0],
    "beam_width": [0, 2, 4, "1", True],
    "length_penalty": [0, 1.5, "1", True],
    "early_stopping": [True, "never", 0, "false", []],
    "priority": ["0", True, 0.5, -(2**31) - 1, 2**31, 10**30],
    "cache_salt": ["", 5, ["a"], "x" * 257, "\ud800"],
    "presence_penalty": [2.1, -2.1, False, "0"],
    "frequency_penalty": [2.1, -2.1, False, "0"],
    "logit_bias": [
        *({"abc": 1}, {"-1": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"5": None}, {"5": 1, "05": 2}, {str(V): 1}),
        *(dict.fromkeys(map(str, range(1025)), 1), [], 5),
    ],
    "allowed_token_ids": [[], [-1], [V], ["1"], [True], 5],
    "bad_words": [[""], "word", [1], ["a"] * 129, ["x" * 257], ["\ud800"]],
    "include_stop_str_in_output": [1, "yes"],
    "prompt_logprobs": [-1, 21, "1", True, 1.5],
    "return_timings": [1],
    "response_format": [
        "text",
        {},
        {"type": "xml"},
        {"type": "text", "more": 1},
        {"type": "json_object", "schema": {}},
        {"type": "json_schema"},
        *(
            {"type": "json_schema", "json_schema": named}
            for named in (
                {"schema": {}},
                {"name": "a"},
                {"name": "a b", "schema": {}},
                {"name": "x" * 65, "schema": {}},
                {"name": "a", "schema": []},
                {"name": "a", "schema": {}, "strict": 1},
                {"name": "a", "schema": {}, "description": 1},
                {"name": "a", "schema": {}, "more": 1},
                {"name": "a", "schema": {"not": {}}},
                {"name": "a", "schema": {"type": "strin"}},
                {"name": "a", "schema": {"$ref": "http://127.0.0.1/"}},
                {"name": "a", "schema": {"pattern": "("}},
                {"name": "a", "schema": {"const": "\ud800"}},
            )
        ),
    ],
    "structured_outputs": [{}, "json", {"json": {}, "regex": "a"}, {"xml": 1}, {"json": 5}, {"json_object": 1}],
    "guided_json": [5, [], "{", "[", {"if": {}}, '{"$ref": "#/a"}', "{" * 5000],
    "guided_regex": ["", "(", 5, r"(a)\1", "(?=a)", "a\ud800", "a" * 70_000],
    "guided_choice": [[], "a", ["a", 1], [""], {}],
    "guided_grammar": ["", "no grammar", "start: other", 5, "root ::= other", "start: start"],
    "model": [5, ["a"], {}],
}
BAD_CHAT_FIELDS = {
    "best_of": [2, 0, "1", True],
    "tools": [
        {},
        "f",
        ["f"],
        [{}],
        [TOOL, TOOL],
        [TOOL | {"type": "custom"}],
        [{"type": "function"}],
        [TOOL] * 129,
        *(
            [tool(**function)]
            for function in (
                {"name": ""},
                {"name": "a b"},
                {"name": "x" * 65},
                {"name": "é"},
                {"name": 5},
                {"name": "a", "more": 1},
                {"name": "a", "parameters": []},
                {"name": "a", "parameters": {"\ud800": 1}},
                {"name": "a", "strict": 1},
                {"name": "a", "description": 1},
                {"name": "a", "description": "\udc00"},
            )
        ),
    ],
    "tool_choice": ["auto", "required", {"type": "function"}, 5, [], "f"],
    "parallel_tool_calls": ["yes", 1],
    "add_generation_prompt": ["yes", 1],
    "continue_final_message": [True, "yes"],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto"],
    "logprobs": [1, 0, "true"],
    "top_logprobs": [0, 5, 21, -1, "1", True],  # all but the last three: without logprobs
    "max_tokens": [0, -1],
    "thinking_budget": [-1, 1.5, "5", True],
    "reasoning_effort": ["some", 5, ["low"], "None"],
    "modalities": [["text", "audio"]],
    "audio": [{}],
    "messages": [None, [], "hello", {}, [None], [{}], [[]], [{"role": "foo", "content": "x"}], [{"role": "user"}]],
    "chat_template_kwargs": ["x", [], {"enable_thinking": "yes"}, {"foo": 1}],
}
BAD_TEXT_FIELDS = {
    "best_of": [0, -1, 17, 10**30, "2", True, 1.5],
    "logprobs": [True, -1, 21, "1"],
    "echo": ["yes", 0],
    "suffix": [5, ["x"], "\ud800"],
    "prompt": [
        *(None, "", [""], [], [[]], 5, {}, True, [None], [{}], ["a", 5], [5, "a"], [[5], "a"], [["a"]], [["a", 5]]),
        *([-1], [V], [2**63], [10**30], [1.5], [True], [[[5]]], "\ud800"),
    ],
}


def cases(path: str, table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(path, name, value, id=f"{path[4:8]}-{name}-{value!r:.40}")
        for name in table
        for value in table[name]
    ]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        *cases(CHAT, BAD_FIELDS | BAD_CHAT_FIELDS),
        *cases(TEXT, BAD_FIELDS | BAD_TEXT_FIELDS),
    ],
)
def test_62_a_bad_value_is_refused_with_the_fields_name(server: LiveServer, path: str, name: str, value: Any) -> None:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
    status, body = raw_request(server, path, json.dumps(base | {name: value}).encode())
    assert_error(status, body)
    param = body["error"]["param"]
    assert param.replace("[", ".").split(".")[0] == name, body


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("place", ['"temperature": {}', '"logit_bias": {{"5": {}}}', '"seed": {}', '"metadata": [{}]'])
def test_numbers_that_json_does_not_have_are_refused(server: LiveServer, path: str, literal: str, place: str) -> None:
    body = '{"prompt": "a", ' + place.format(literal) + "}"
    assert literal in assert_error(*raw_request(server, path, body.encode()))


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"5", b"null", b'"a"', b"true", b"{", b'{"a"', b"{]", b"\xff\xfe{}", b'{"a": "\xff"}', b"a=b"),
        *(b"\xef\xbb\xbf{}", '{"prompt": "a"}'.encode("utf-16"), b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000),
        *(b'{"seed": ' + b"9" * 5000 + b"}", b"{" + b'"prompt": "a", ' * 2 + b'"n": 1}', b'{"a": {"b": 1, "b": 2}}'),
        *(b'{"prompt": "a", "\\ud800": 1}', b"\x00", b"{}{}"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_body_that_is_no_json_object_is_refused(server: LiveServer, path: str, body: bytes) -> None:
    assert_error(*raw_request(server, path, body))


@pytest.mark.parametrize(
    "headers",
    [
        ["content-type: text/plain"],
        ["content-type: application/x-www-form-urlencoded"],
        ["content-type: multipart/form-data; boundary=x"],
        ["content-type:"],
        ["content-encoding: gzip"],
    ],
)
def test_another_content_type_is_415(server: LiveServer, headers: list[str]) -> None:
    assert_error(*raw_request(server, TEXT, b'{"prompt": "a"}', *headers), expected=415, param=None)


def test_63b_an_unknown_field_is_refused_with_the_nearest_known_name(server: LiveServer) -> None:
    message = refuse(server, CHAT, temprature=0, param=None)
    assert message == "Unrecognized request argument supplied: temprature; did you mean temperature?"
    assert "num_ctx" in refuse(server, TEXT, num_ctx=5)
    refuse(server, CHAT, messages=[{"role": "user", "content": "a", "foo": 1}], param="messages[0].foo")
    refuse(server, CHAT, stream=True, stream_options={"foo": True}, param="stream_options.foo")


def test_42_stream_options_need_stream(server: LiveServer) -> None:
    refuse(server, CHAT, stream_options={"include_usage": True}, param="stream_options")


def test_28_a_prompt_that_is_too_long_states_the_numbers(server: LiveServer) -> None:
    for stream in (False, True):
        for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
            message = refuse(server, TEXT, prompt=[5] * length, stream=stream, max_tokens=None, param="prompt")
            assert f"holds {MAX_MODEL_LEN} tokens" in message
            assert f"{length} in the prompt" in message
        response = server.post(CHAT, {"messages": [{"role": "user", "content": "1 " * 600}], "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("asked", [MAX_MODEL_LEN, 10**18, 10**20])
def test_28_more_tokens_than_the_context_holds_are_refused(server: LiveServer, asked: int) -> None:
    for path in (CHAT, TEXT):
        for name in ("max_tokens", "max_completion_tokens"):
            body = {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
            error = server.post(path, body | {name: asked}).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert str(asked) in error["message"]


@pytest.mark.parametrize(
    ("content", "fits"),
    [("null", True), ('[{"type": "text", "text": "a"}]', True), ('[{"type": "image_url", "image_url": "x"}]', False)],
)
def test_messages_of_the_model_shape_only(server: LiveServer, content: str, fits: bool) -> None:
    calls = '"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]'
    message = f'{{"role": "assistant", "content": {content}, {calls}}}'
    body = f'{{"messages": [{message}, {{"role": "user", "content": "a"}}], "max_tokens": 1}}'
    status, answer = raw_request(server, CHAT, body.encode())
    assert status == (200 if fits else 400), answer


def nested(depth: int) -> bytes:
    """A body whose `metadata` makes it so many objects and lists deep."""
    return b'{"prompt": "a", "max_tokens": 1, "metadata": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(("depth", "status"), [(63, 200), (64, 200), (65, 400)])
def test_the_limit_of_nesting(server: LiveServer, depth: int, status: int) -> None:
    assert raw_request(server, TEXT, nested(depth))[0] == status


@pytest.mark.parametrize(("count", "words"), [(2048, "the context holds"), (2049, "at most 2048")])
def test_the_limit_of_messages(server: LiveServer, count: int, words: str) -> None:
    assert words in refuse(server, CHAT, messages=[{"role": "user", "content": "a"}] * count)


@pytest.mark.parametrize(("length", "status"), [(255, 200), (256, 200), (257, 400)])
def test_the_limit_of_a_stop_string(server: LiveServer, length: int, status: int) -> None:
    body = {"prompt": "a", "max_tokens": 1, "stop": ["x" * length] * 4}
    assert server.post(TEXT, body).status_code == status


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_the_limits_of_prompts_and_answers(server: LiveServer, field: str) -> None:
    assert "257 prompts" in refuse(server, TEXT, prompt=["a"] * 257, param="prompt")
    for num_prompts, count, fits in ((4, 16, True), (5, 16, False), (32, 2, True), (33, 2, False)):
        body = {"prompt": ["a"] * num_prompts, "max_tokens": 1, field: count}
        assert server.post(TEXT, body).status_code == (200 if fits else 400)
    assert "33 prompts with 2 answers each are 66 sequences" in refuse(
        server, TEXT, prompt=["a"] * 33, param=field, **{field: 2}
    )


def padded(size: int) -> bytes:
    body = b'{"prompt": "a", "max_tokens": 1, "user": "'
    return body + b"x" * (size - len(body) - 2) + b'"}'


@pytest.mark.parametrize(("extra", "status"), [(-1, 200), (0, 200), (1, 413)])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_limit_of_the_body(server: LiveServer, extra: int, status: int, chunked: bool) -> None:
    body = padded(8 * 2**20 + extra)
    if chunked:
        pieces = [body[i : i + 2**20] for i in range(0, len(body), 2**20)] + [b""]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        answer = raw_request(server, TEXT, framed, "transfer-encoding: chunked")
    else:
        answer = raw_request(server, TEXT, body)
    assert answer[0] == status
    if status == 413:
        assert_error(*answer, expected=413, param=None)


def test_a_body_announced_too_large_is_refused_before_it_is_sent(server: LiveServer) -> None:
    with raw_connection(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: 100000000000\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_random_damage_never_causes_a_server_error(server: LiveServer) -> None:
    """Well-formed requests with a few random changes: only 200 and 400 come back, and the server goes on."""
    rng = random.Random(0)
    values = [
        None,
        True,
        0,
        -1,
        1,
        2**63,
        1.5,
        "",
        "a",
        [],
        [5],
        ["a"],
        {},
        {"type": "text"},
        [[5]],
        [{}],
        "\U0001fae0",
    ]
    names = [*BAD_FIELDS, *BAD_CHAT_FIELDS, *BAD_TEXT_FIELDS, "user", "foo", "stream_options"]
    for _ in range(300):
        path = rng.choice([CHAT, TEXT])
        body: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "the"}
        body |= {"max_tokens": 1} | {rng.choice(names): rng.choice(values) for _ in range(rng.randint(1, 3))}
        response = server.post(path, body)
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code == 400:
            assert_error(400, response.json())
    assert server.post(TEXT, {"prompt": "the"}).status_code == 200
