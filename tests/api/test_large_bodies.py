"""Large bodies and answers: bounded in what holds up the event loop, and read and written like small ones."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from pydantic import ValidationError

from cupyllm.api import body as body_module
from cupyllm.api import large_answer
from cupyllm.api.body import MAX_CONTAINERS, MAX_VALUES, parse_json_object
from cupyllm.api.errors import json_response
from cupyllm.api.large_answer import large_json_response
from cupyllm.api.protocol.chat import ChatRequest
from cupyllm.api.protocol.completions import CompletionRequest
from cupyllm.api.protocol.embeddings import EmbeddingRequest
from cupyllm.api.protocol.responses import ResponsesRequest
from cupyllm.api.protocol.shared import StrictModel
from cupyllm.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from cupyllm.errors import RequestError
from cupyllm.structured.grammar import MAX_SCHEMA_BYTES, json_schema_grammar
from tests.api.live_server import MESSAGES, LiveServer, raw_request

TEXT = "/v1/completions"
PARTS = ["\\", '"', "[", "]", "{", "}", ",", ":", "a", "\n", "é", "\U0001fae0", '\\"', "\\\\"]


def some_json(rng: random.Random, depth: int = 4) -> Any:
    kind = rng.randrange(6) if depth else rng.randrange(3)
    if kind < 2:
        return "".join(rng.choices(PARTS, k=rng.randrange(8)))
    if kind == 2:
        return rng.choice([None, True, -1.5, 12345])
    items = [some_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return items if kind < 5 else {f'{i}"\\,[': item for i, item in enumerate(items)}


def parts_of(value: Any) -> tuple[int, int]:
    """(separators of values, lists and objects and keys), found by walking through the value."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [parts_of(item) for item in (value.values() if isinstance(value, dict) else value)]
    commas = sum(part[0] for part in inner) + max(len(value) - 1, 0)
    return commas, sum(part[1] for part in inner) + 1 + (len(value) if isinstance(value, dict) else 0)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 64, 65_536])
def test_parts_are_counted_outside_of_texts_wherever_a_window_ends(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "_WINDOW_BYTES", window)
    rng = random.Random(window)
    num_large = 0
    for _ in range(400):
        value = {"": some_json(rng)}
        num_commas, num_containers = parts_of(value)
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        for limits, words in (
            ((num_commas, num_containers), None),
            ((num_commas - 1, num_containers), "values"),
            ((num_commas, num_containers - 1), "lists, objects and keys"),
        ):
            monkeypatch.setattr(body_module, "MAX_VALUES", limits[0])
            monkeypatch.setattr(body_module, "MAX_CONTAINERS", limits[1])
            if words is None:
                assert parse_json_object(body) == value
            else:
                with pytest.raises(RequestError, match=words):
                    parse_json_object(body)
        num_large += num_containers > 5
    assert num_large > 50, "most were so small that they show nothing"


def sized(name: str, count: int) -> bytes:
    """A request that is answered, with so many values, or so many lists, objects and keys."""
    shown = {
        "values": "[" + ",".join(["0"] * (count - 1)) + "]",  # and two commas between the fields
        "lists": "[" + ",".join(["[]"] * (count - 5)) + "]",  # and itself, the body and its three keys
        "keys": json.dumps({str(number): 0 for number in range(count - 5)}),
    }[name]
    return b'{"prompt": "a", "max_tokens": 1, "metadata": ' + shown.encode() + b"}"


@pytest.mark.parametrize(
    ("name", "limit"), [("values", MAX_VALUES), ("lists", MAX_CONTAINERS), ("keys", MAX_CONTAINERS)]
)
def test_the_limits_of_parts(server: LiveServer, name: str, limit: int) -> None:
    for count, expected in ((limit, 200), (limit + 1, 400)):
        status, answer = raw_request(server, TEXT, sized(name, count))
        assert status == expected, answer
    assert str(limit) in answer["error"]["message"]
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", None)


REQUESTS: dict[type[StrictModel], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "a"},
    EmbeddingRequest: {"input": "a"},
    ResponsesRequest: {"input": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
}
FIELDS = [pytest.param(kind, name, id=f"{kind.__name__}-{name}") for kind in REQUESTS for name in kind.model_fields]


def num_errors(kind: type[StrictModel], body: dict[str, Any]) -> int:
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_thousand_wrong_items_are_not_a_thousand_errors(kind: type[StrictModel], name: str) -> None:
    """pydantic lists every error it has found, whatever is then made of them."""
    for many in ([{}] * 1000, ["\ud800"] * 1000, [1.5] * 1000, {str(number): 1 for number in range(1000)}):
        assert num_errors(kind, REQUESTS[kind] | {name: many}) <= 10


def test_an_unknown_key_among_many_is_named(server: LiveServer) -> None:
    options = {"include_usage": True} | {f"foo{number}": 1 for number in range(50)}
    response = server.post(TEXT, {"prompt": "a", "stream": True, "stream_options": options})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options.foo0"


def test_a_schema_of_too_many_items_is_refused_before_it_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MAX_SCHEMA_BYTES // 2
    with pytest.raises(RequestError, match=f"the schema has [0-9]+ bytes; at most {MAX_SCHEMA_BYTES}"):
        json_schema_grammar({"enum": [1] * (most - 1)})
    monkeypatch.setattr(json, "dumps", lambda *_, **__: pytest.fail("it was written out"))
    for schema in ({"enum": [1] * most}, {"anyOf": [{"const": [[1] * 100] * 100}] * 7}):
        with pytest.raises(RequestError, match=f"the schema has more than {MAX_SCHEMA_BYTES} bytes"):
            json_schema_grammar(schema)


@pytest.mark.parametrize("at_once", [1, 3, 1024])
def test_a_large_answer_is_the_text_that_a_small_one_would_be(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_answer, "_ITEMS_AT_ONCE", at_once)
    vectors = [{"index": place, "embedding": [place / 7, -1e-9, 0.0]} for place in range(4)]
    for answer in (
        {"count": 3, "tokens": [1, 2, 3], "token_strs": ["a, b", 'é"', "\ud800"]},
        {"tokens": [], "none": None, 'a "key"': {}},
        {"data": vectors, "more": [[1, 2, 3, 4], []], "usage": {"total_tokens": 7}},
    ):
        large, small = large_json_response(answer), json_response(answer)
        assert large.body == small.body
        assert large.raw_headers == small.raw_headers
    with pytest.raises(ValueError, match="JSON"):
        large_json_response({"data": [1.0, math.nan]})


def test_tokens_of_a_long_text_come_whole(server: LiveServer) -> None:
    text = "The quick brown fox. " * 2000
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == server.loaded.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
