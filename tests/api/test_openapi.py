"""GET /openapi.json is a valid document, holds every route and field, and says what may be sent.

That real answers are as it says is checked wherever a test talks to a server: see described.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest

from cupyllm.api.protocol.chat import ChatRequest
from cupyllm.api.protocol.completions import CompletionRequest
from cupyllm.api.protocol.embeddings import EmbeddingRequest
from cupyllm.api.protocol.responses import ResponsesRequest
from cupyllm.api.protocol.shared import NoEffect, NotYet, StrictModel
from cupyllm.api.protocol.tokenize import TokenizeRequest
from tests.api.described import Description
from tests.api.live_server import MESSAGES, LiveServer, run_server

REQUESTS = [ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest, TokenizeRequest]


@pytest.fixture(scope="module")
def description(server: LiveServer) -> Description:
    return Description(server.get("/openapi.json").json())


def test_the_document_is_valid_openapi(description: Description) -> None:
    assert description.document["openapi"].startswith("3.1.")
    openapi_spec_validator.validate(description.document)


def test_every_route_is_described_and_every_described_route_exists(
    server: LiveServer, description: Description
) -> None:
    described = {(method.upper(), path) for path, item in description.document["paths"].items() for method in item}
    registered = {(method, path.replace(":path", "")) for method, path in server.routes if method != "HEAD"}
    assert described == registered
    for method, path in described:
        assert server.status(method, path) != 405


def test_every_operation_has_a_summary_and_a_name_of_its_own(description: Description) -> None:
    operations = [operation for item in description.document["paths"].values() for operation in item.values()]
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_field_of_a_request_is_described(description: Description, kind: type[StrictModel]) -> None:
    schema = description.document["components"]["schemas"][kind.__name__]
    assert set(schema["properties"]) == set(kind.model_fields)
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("kind", REQUESTS)
def test_null_is_described_as_absent(description: Description, kind: type[StrictModel]) -> None:
    for name, field in kind.model_fields.items():
        if not field.is_required():
            schema = description.document["components"]["schemas"][kind.__name__]["properties"][name]
            description.check_value(None, schema)


@pytest.mark.parametrize("kind", REQUESTS)
def test_of_a_field_that_is_not_supported_only_its_neutral_values_are_described(
    description: Description, kind: type[StrictModel]
) -> None:
    for name, field in kind.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, NotYet):
                schema = description.document["components"]["schemas"][kind.__name__]["properties"][name]
                assert schema["enum"] == [*mark.neutral, None]
            elif isinstance(mark, NoEffect):
                description.check_value(
                    {"anything": [1]}, {"$ref": f"#/components/schemas/{kind.__name__}/properties/{name}"}
                )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": MESSAGES, "temprature": 0},
        {"messages": MESSAGES, "stream": "yes"},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "tool"}]},
        {"messages": MESSAGES, "stop": ["a"] * 5},
        {"messages": MESSAGES, "max_tokens": 0},
    ],
)
def test_what_is_refused_is_not_described(server: LiveServer, description: Description, body: dict[str, Any]) -> None:
    assert server.post("/v1/chat/completions", body).status_code == 400
    with pytest.raises(AssertionError):
        description.check_value(body, {"$ref": "#/components/schemas/ChatRequest"})


def test_the_document_is_that_of_its_server(
    server: LiveServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are described where they are needed, and unknown fields where they are allowed."""
    monkeypatch.setenv("KEYS_OF_THIS_TEST", "sk-first")
    with run_server(model_folder, strict_parameters=False, api_key_env="KEYS_OF_THIS_TEST") as live:
        assert live.get("/openapi.json").status_code == 401
        lax = live.get("/openapi.json", headers={"authorization": "Bearer sk-first"}).json()
    openapi_spec_validator.validate(lax)
    assert lax["security"] == [{"apiKey": []}]
    assert server.get("/openapi.json").json()["security"] == [{}]
    assert all(lax["paths"][path]["get"]["security"] == [] for path in ("/health", "/", "/static/{name}"))
    assert "security" not in lax["paths"]["/live/steps"]["get"]
    body = {"messages": MESSAGES, "temprature": 0}
    schema = {"$ref": "#/components/schemas/ChatRequest"}
    Description(lax).check_value(body, schema)
    with pytest.raises(AssertionError):
        Description(lax).check_value(body | {"stream": "yes"}, schema)


def test_a_wrong_answer_is_found(description: Description) -> None:
    """The check that all other tests rely on can fail."""
    error = {"error": {"message": "a", "type": "server_error", "param": None, "code": None}}
    schema = {"$ref": "#/components/schemas/Error"}
    description.check_value(error, schema)
    for wrong in ({"error": "a"}, {"error": error["error"] | {"type": "other"}}, error | {"more": 1}, {}):
        with pytest.raises(AssertionError):
            description.check_value(wrong, schema)
