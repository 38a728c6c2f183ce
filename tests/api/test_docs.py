"""docs/api.md and configs/ say what the code does."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from cupyllm.api.protocol.chat import ChatRequest
from cupyllm.api.protocol.completions import CompletionRequest
from cupyllm.api.protocol.embeddings import EmbeddingRequest
from cupyllm.api.protocol.responses import ResponsesRequest
from cupyllm.api.protocol.shared import NoEffect, NotYet, SharedRequest, StrictModel
from cupyllm.api.protocol.tokenize import TokenizeRequest
from cupyllm.config import ServerConfig, load_config
from tests.api.live_server import LiveServer

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading of the second level, to the next."""
    return DOCS.split(f"\n## {title}\n")[1].split("\n## ")[0]


def fates(kind: type[StrictModel]) -> dict[str, str]:
    names = {NoEffect: "no effect", NotYet: "not yet"}
    return {
        name: next((names[type(mark)] for mark in field.metadata if type(mark) in names), "honoured")
        for name, field in kind.model_fields.items()
    }


@pytest.mark.parametrize(("kind", "column"), [(ChatRequest, 0), (CompletionRequest, 1)])
def test_the_field_table_holds_every_field_with_its_fate(kind: type[SharedRequest], column: int) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w -]+?) \| ([\w -]+?) \|", section("Fields"), re.MULTILINE)
    assert {name: fate[column] for name, *fate in rows if fate[column] != "-"} == fates(kind)


@pytest.mark.parametrize(
    ("kind", "title"),
    [(TokenizeRequest, "Tokenize and detokenize"), (ResponsesRequest, "Responses"), (EmbeddingRequest, "Embeddings")],
)
def test_a_table_of_one_route_holds_every_field_with_its_fate(kind: type[StrictModel], title: str) -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| ([\w ]+?) \|", section(title), re.MULTILINE)) == fates(kind)


def test_every_route_is_documented(server: LiveServer) -> None:
    documented = {tuple(route.split()) for route in re.findall(r"^\| `((?:GET|POST) \S+)` \|", DOCS, re.MULTILINE)}
    registered = {(method, path.replace("{model_id:path}", "{id}")) for method, path in server.routes}
    assert documented == {route for route in registered if route[0] != "HEAD"}


def test_default_config_holds_every_key_with_its_default() -> None:
    content = json.loads((ROOT / "configs" / "default.json").read_text(encoding="utf-8"))
    assert list(content) == [field.name for field in dataclasses.fields(ServerConfig)]
    assert load_config(ServerConfig, ROOT / "configs" / "default.json") == ServerConfig()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_config_file_is_valid(path: Path) -> None:
    load_config(ServerConfig, path)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_request_models_have_a_json_schema(kind: type[SharedRequest]) -> None:
    assert set(kind.model_json_schema()["properties"]) == set(kind.model_fields)
