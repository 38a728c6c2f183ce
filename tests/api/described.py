"""Holds what a server takes and answers against the server's own description of itself, /openapi.json."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import httpx
import jsonschema

Json = dict[str, Any]


class Description:
    """An OpenAPI document to hold exchanges against."""

    def __init__(self, document: Json) -> None:
        self.document = document
        self._paths = {re.sub(r"\\{\w+\\}", "(.+)", re.escape(path)): path for path in document["paths"]}
        self._validator = cache(self._make_validator)

    def check(self, response: httpx.Response) -> None:
        """Fail unless a JSON answer is as described. A request that was taken must have been described too."""
        request = response.request
        response.extensions["description"] = self  # for the events of a stream, once they have been read
        if not response.headers.get("content-type", "").startswith("application/json") or request.method == "HEAD":
            return
        answer = json.loads(response.read())
        operation = self.operation(request.method, request.url.path)
        if operation is None:
            assert response.status_code >= 400
            self.check_value(answer, {"$ref": "#/components/schemas/Error"})
            return
        self.check_value(answer, _json_schema(self._response(operation, response.status_code)))
        if response.status_code == 200 and "requestBody" in operation:
            given = {name: value for name, value in json.loads(request.read()).items() if value is not None}
            self.check_value(given, _json_schema(operation["requestBody"]))

    def check_event(self, event: Any, path: str) -> None:
        """Fail unless an event of a stream is as described."""
        operation = self.operation("POST", path)
        assert operation is not None
        described = operation["responses"]["200"]["content"]["text/event-stream"]["x-event-schema"]
        self.check_value(event, {"anyOf": [described, {"$ref": "#/components/schemas/Error"}]})

    def check_value(self, value: Any, schema: Json) -> None:
        """Fail unless a JSON value is valid under a schema that may refer to the document's components."""
        error = jsonschema.exceptions.best_match(self._validator(json.dumps(schema)).iter_errors(value))
        assert error is None, f"{error.json_path}: {error.message[:500]}"

    def operation(self, method: str, path: str) -> Json | None:
        for pattern, template in self._paths.items():
            if re.fullmatch(pattern, path):
                return self.document["paths"][template].get(method.lower())
        return None

    def _response(self, operation: Json, status: int) -> Json:
        described = operation["responses"]
        assert str(status) in described, f"{operation['operationId']} is not said to answer {status}"
        return self.document["components"]["responses"][str(status)] if status != 200 else described["200"]

    def _make_validator(self, schema: str) -> jsonschema.Draft202012Validator:
        return jsonschema.Draft202012Validator(json.loads(schema) | {"components": self.document["components"]})


def _json_schema(described: Json) -> Json:
    return described["content"]["application/json"]["schema"]
