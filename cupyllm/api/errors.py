"""What a caller sees of an error: status, OpenAI's error object, headers.

    400  the request is wrong (RequestError); `param` names the field          not worth retrying
    401, 403, 404, 405, 408, 413, 415   ApiError, raised by the HTTP layer
    429  the waiting queue is full (QueueFullError)                            retry after a second
    500  the engine or this program failed; the text says so and no more       the log has the details under the id
    503  dead, stuck or stopping (UnavailableError)                                 retry later, elsewhere if possible

The one place that knows which error class becomes which status.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cupyllm.errors import CupyllmError, EngineError, QueueFullError, RequestError

log = logging.getLogger(__name__)

RETRY_SOON = {"retry-after": "1"}
RETRY_LATER = {"retry-after": "5"}


class ApiError(CupyllmError):
    """An answer other than 200 that HTTP itself asks for: no key, no such route, a body too large."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers


class UnavailableError(EngineError):
    """The engine takes no requests now: it is stopping, stuck or dead."""


def error_object(error: Exception, request_id: str) -> tuple[int, dict[str, Any], dict[str, str] | None]:
    """Status, `{"error": {...}}` and headers for an exception. Logs it when the fault is ours."""
    invalid = "invalid_request_error"
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        return status, _body(error.message, invalid, error.param, error.code), None
    if isinstance(error, ApiError):
        return error.status, _body(error.message, invalid, None, error.code), error.headers
    if isinstance(error, HTTPException):
        return error.status_code, _body(error.detail, invalid, None, None), dict(error.headers or {})
    if isinstance(error, QueueFullError):
        return 429, _body(str(error), "rate_limit_error", None, "rate_limit_exceeded"), RETRY_SOON
    if isinstance(error, UnavailableError):
        return 503, _body(str(error), "server_error", None, "unavailable"), RETRY_LATER
    log.error("%s failed", request_id, exc_info=error)
    return 500, _body(f"internal error; request id {request_id}", "server_error", None, "internal_error"), None


async def routing_error(request: Request, error: Exception) -> Response:
    """The answer to what Starlette raises: no such route, or not with this method."""
    status, body, headers = error_object(error, request.state.request_id)
    body["error"]["message"] += f": {request.method[:20]} {request.scope['path'][:200]}"
    return json_response(body, status=status, headers=headers)


def json_response(body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer. Written in ASCII: a message may quote half of a surrogate pair, which UTF-8 cannot hold."""
    return Response(json.dumps(body, allow_nan=False), status, headers, media_type="application/json")


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
