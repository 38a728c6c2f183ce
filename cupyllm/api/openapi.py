"""GET /openapi.json: every route with its request, answers and errors, made from the types the routes read with.

`_BODIES` says what each endpoint takes and gives; paths, methods and texts come from the routes themselves. A field
that is not supported yet has only the values that ask for nothing, null stands wherever a field may be left out, and
what the sampling parameters mean is taken from their classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import cupyllm
from cupyllm.api import chat, completions, embeddings, health, live_view, models, responses, tokenize
from cupyllm.api.errors import json_response
from cupyllm.api.protocol import answers, chat_answers, live_answers, response_answers, text_answers
from cupyllm.api.protocol.chat import ChatRequest
from cupyllm.api.protocol.completions import CompletionRequest
from cupyllm.api.protocol.embeddings import EmbeddingRequest
from cupyllm.api.protocol.responses import ResponsesRequest
from cupyllm.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from cupyllm.api.state import server_state
from cupyllm.beam_search import BeamParams
from cupyllm.docstrings import field_meanings
from cupyllm.sampling import SamplingParams

Json = dict[str, Any]
_REF = "#/components/schemas/{model}"


def routes() -> list[Route]:
    return [Route("/openapi.json", openapi, methods=["GET"])]


async def openapi(request: Request) -> Response:
    """This description of the API."""
    state = server_state(request)
    return json_response(document(request.app.routes, needs_key=state.needs_key, strict=state.config.strict_parameters))


@dataclass(frozen=True)
class Bodies:
    """What an endpoint takes and gives: types that pydantic can make a JSON schema of.

    answer   None where there is nothing but events
    event    of each event of a streamed answer, where the route can stream
    refusals statuses that only some routes have
    media_types of the answer
    needs_key whether the key is asked for, where keys are set
    """

    request: Any
    answer: Any
    event: Any = None
    refusals: tuple[int, ...] = ()
    media_types: tuple[str, ...] = ("application/json",)
    needs_key: bool = True


_ENGINE = (404, 429, 503)  # what can come where the model is named, queued for and run
_BODIES: dict[Callable[..., Any], Bodies] = {
    chat.chat_completions: Bodies(ChatRequest, chat_answers.ChatCompletion, chat_answers.ChatCompletionChunk, _ENGINE),
    completions.completions: Bodies(
        CompletionRequest, text_answers.TextCompletion, text_answers.TextCompletionChunk, _ENGINE
    ),
    responses.create_response: Bodies(ResponsesRequest, response_answers.Response, response_answers.AnyEvent, _ENGINE),
    embeddings.embeddings: Bodies(EmbeddingRequest, answers.Embeddings, None, _ENGINE),
    tokenize.tokenize: Bodies(TokenizeRequest, answers.Tokens, None, (404,)),
    tokenize.detokenize: Bodies(DetokenizeRequest, answers.Text, None, (404,)),
    models.list_models: Bodies(None, answers.ModelList),
    models.retrieve_model: Bodies(None, answers.ModelCard, None, (404,)),
    health.health: Bodies(None, answers.Status, None, (503,), needs_key=False),
    health.ready: Bodies(None, answers.Status, None, (503,)),
    health.metrics: Bodies(None, str, media_types=("text/plain",)),
    health.version: Bodies(None, answers.Version),
    live_view.page: Bodies(None, str, media_types=("text/html",), needs_key=False),
    live_view.static_file: Bodies(
        None, str, None, (404,), ("text/html", "text/javascript", "text/css", "image/svg+xml"), needs_key=False
    ),
    live_view.live_steps: Bodies(None, None, live_answers.LiveEvent, (429, 503)),
    openapi: Bodies(None, Json),
}
_OF_EVERY_ROUTE = (400, 401, 403, 500)
_OF_EVERY_BODY = (408, 413, 415)
_MEANINGS = {
    400: "the request is wrong; `param` names the field, if it is in one",
    401: "no API key, or a wrong one",
    403: "a local server without keys was called by a foreign host name",
    404: "there is no such model, or no such file",
    408: "the body was not complete in time",
    413: "the body is too large",
    415: "the body is not application/json, or is compressed",
    429: "too many sequences wait, or too many pages watch; try again later",
    500: "the server's fault; its log has the details",
    503: "the engine is dead or stuck, or the server is stopping",
}
_REQUEST_ID = {"x-request-id": {"description": "the request's id", "schema": {"type": "string"}}}
_RETRY_AFTER = {"retry-after": {"description": "seconds to wait", "schema": {"type": "integer"}}}


def document(all_routes: Iterable[BaseRoute], *, needs_key: bool, strict: bool) -> Json:
    """The OpenAPI 3.1 document of an application's routes. When not `strict`, unknown request fields are allowed."""
    refs, schemas = _schemas(strict)
    paths: dict[str, Json] = {}
    for route in all_routes:
        assert isinstance(route, Route)
        (method,) = (route.methods or set()) - {"HEAD"}
        path = re.sub(r":\w+}", "}", route.path)
        paths.setdefault(path, {})[method.lower()] = _operation(route, path, refs)
    errors = {str(status): _error(status) for status in _MEANINGS}
    schemes = {"apiKey": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cupyllm", "version": cupyllm.__version__, "license": {"name": "Apache-2.0"}},
        "security": [{"apiKey": []}] if needs_key else [{}],
        "paths": paths,
        "components": {"schemas": schemas, "responses": errors, "securitySchemes": schemes},
    }


def _operation(route: Route, path: str, refs: dict[Any, Json]) -> Json:
    bodies = _BODIES[route.endpoint]
    content: Json = {}
    if bodies.answer is not None:
        content = {media_type: {"schema": refs[bodies.answer]} for media_type in bodies.media_types}
    if bodies.event is not None:  # OpenAPI 3.1 has no word for the type of an event
        events = {"type": "string", "description": "events, each with `data: ` and one JSON value"}
        content["text/event-stream"] = {"schema": events, "x-event-schema": refs[bodies.event]}
    statuses = {*_OF_EVERY_ROUTE, *(_OF_EVERY_BODY if bodies.request else ()), *bodies.refusals}
    answer = {"description": "the answer", "headers": _REQUEST_ID, "content": content}
    operation: Json = {
        "operationId": route.name,
        "summary": (route.endpoint.__doc__ or "").split("\n")[0],
        "responses": {"200": answer}
        | {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)},
    }
    if bodies.request is not None:
        schema = {"application/json": {"schema": refs[bodies.request]}}
        operation["requestBody"] = {"required": True, "content": schema}
    if names := re.findall(r"{(\w+)}", path):
        parameter = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name} | parameter for name in names]
    if not bodies.needs_key:
        operation["security"] = []
    return operation


def _error(status: int) -> Json:
    headers = _REQUEST_ID | (_RETRY_AFTER if status in (429, 503) else {})
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    return {"description": _MEANINGS[status], "headers": headers, "content": content}


@cache
def _schemas(strict: bool) -> tuple[dict[Any, Json], Json]:
    """Type -> reference to its schema, and all schemas by name."""
    requests = [bodies.request for bodies in _BODIES.values() if bodies.request is not None]
    given = [kind for bodies in _BODIES.values() for kind in (bodies.answer, bodies.event) if kind is not None]
    kinds: list[Any] = list(dict.fromkeys([*requests, *given, answers.Error]))
    adapters: list[Any] = [(place, "validation", TypeAdapter(kind)) for place, kind in enumerate(kinds)]
    by_place, definitions = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    schemas = cast(Json, definitions["$defs"])
    meanings = field_meanings(BeamParams) | field_meanings(SamplingParams)
    for kind in requests:
        schemas[kind.__name__]["additionalProperties"] = not strict
        _complete_request(schemas[kind.__name__], meanings)
    return {kind: by_place[place, "validation"] for place, kind in enumerate(kinds)}, schemas


def _complete_request(schema: Json, meanings: dict[str, str]) -> None:
    """Allow null where a field may be absent, and say what fields mean."""
    for name, field in schema["properties"].items():
        if name in meanings:
            field.setdefault("description", meanings[name])
        if name not in schema.get("required", ()) and not _allows_null(field):
            texts = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]} | texts


def _allows_null(schema: Json) -> bool:
    if "anyOf" in schema:
        return any(map(_allows_null, schema["anyOf"]))
    if "enum" in schema:
        return None in schema["enum"]
    return schema.get("type", "null") == "null" and "$ref" not in schema and "const" not in schema
