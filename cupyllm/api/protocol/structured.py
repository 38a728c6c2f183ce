"""What a request says about the form of its answer: OpenAI's `response_format`, and the fields that vLLM has besides.

All of them become one guide. What the guide enforces, and which schemas it can, is the subject of cupyllm/structured.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from cupyllm.errors import RequestError
from cupyllm.json_checks import as_object, kind_of, only_keys, refuse, text_of
from cupyllm.structured.compiler import GuideCompiler
from cupyllm.structured.grammar import MAX_SCHEMA_BYTES, grammar_of
from cupyllm.token_guide import Guide

_NAME = r"[A-Za-z0-9_-]{1,64}"
_NAMED_SCHEMA_KEYS = frozenset({"name", "schema", "description", "strict"})
_KINDS = frozenset({"json", "regex", "choice", "grammar", "json_object"})

Spec = tuple[str, Any, str]  # as grammar_of takes it
JsonSchema = Annotated[dict[str, Any] | str, Field(description="a JSON schema, or the text of one")]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class NamedSchema(TypedDict):
    """A JSON schema. `strict` changes nothing: an answer always keeps to it."""

    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    schema: dict[str, Any]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


class PlainFormat(TypedDict):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(TypedDict):
    """JSON that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = PlainFormat | SchemaFormat


class StructuredOutputs(TypedDict, total=False):
    """vLLM's form; one of them."""

    json: JsonSchema | None
    json_object: bool | None
    regex: str | None
    choice: Choices | None
    grammar: str | None


class AsksForForm(Protocol):
    """The fields of a request that this module reads."""

    response_format: Any
    structured_outputs: Any
    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    use_beam_search: bool


def read_guide(ask: AsksForForm, guides: GuideCompiler) -> Guide | None:
    """The guide that the request asks for; None for plain text. Compiles, which may take a second.

    Raises RequestError naming the field.
    """
    grammar = grammar_of(
        [
            *_of_response_format(ask.response_format),
            *_of_structured_outputs(ask.structured_outputs),
            ("json", _parsed(ask.guided_json, "guided_json"), "guided_json"),
            ("regex", ask.guided_regex, "guided_regex"),
            ("choice", ask.guided_choice, "guided_choice"),
            ("grammar", ask.guided_grammar, "guided_grammar"),
        ]
    )
    if grammar is None:
        return None
    if ask.use_beam_search:
        raise RequestError(f"{grammar.param} cannot be used with use_beam_search", param=grammar.param)
    return guides.compile(grammar)


def _of_response_format(given: object) -> list[Spec]:
    if given is None:
        return []
    path = "response_format"
    values = as_object(given, path)
    kind = text_of(values, "type", path)
    if kind != "json_schema":
        if kind not in ("text", "json_object"):
            refuse(f"{path}.type", f"is {kind[:80]!r}; supported: text, json_object, json_schema")
        only_keys(values, frozenset({"type"}), path, f"a response_format of type {kind}")
        return [] if kind == "text" else [("json_object", True, path)]
    only_keys(values, frozenset({"type", "json_schema"}), path, "a response_format of type json_schema")
    path = "response_format.json_schema"
    named = as_object(values.get("json_schema"), path)
    only_keys(named, _NAMED_SCHEMA_KEYS, path, "it")
    name = text_of(named, "name", path)
    if not re.fullmatch(_NAME, name):
        refuse(f"{path}.name", "must have 1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
    if "description" in named:
        text_of(named, "description", path)
    if not isinstance(named.get("strict", True), bool):
        refuse(f"{path}.strict", "must be true or false")
    schema = named.get("schema")
    if not isinstance(schema, dict):
        refuse(f"{path}.schema", "is missing" if schema is None else f"must be an object, not {kind_of(schema)}")
    return [("json", schema, f"{path}.schema")]


def _of_structured_outputs(given: object) -> list[Spec]:
    if given is None:
        return []
    path = "structured_outputs"
    values = as_object(given, path)
    only_keys(values, _KINDS, path, "it")
    if not values:
        refuse(path, f"must hold one of {', '.join(sorted(_KINDS))}")
    specs = [(kind, _parsed(spec, f"{path}.{kind}") if kind == "json" else spec) for kind, spec in values.items()]
    return [(kind, spec, f"{path}.{kind}") for kind, spec in specs]


def _parsed(schema: object, path: str) -> object:
    """The schema itself, where it is given as text."""
    if not isinstance(schema, str):
        return schema
    if len(schema) > MAX_SCHEMA_BYTES:
        refuse(path, f"has {len(schema)} characters; at most {MAX_SCHEMA_BYTES}")
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        refuse(path, f"is text that is not JSON: {error}")
