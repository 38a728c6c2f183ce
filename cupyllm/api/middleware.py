"""What stands around every route: a request id, the error object for whatever is raised, and who may come in.

Plain ASGI callables, outermost first:

    RequestIds    gives the request an id and its arrival time, and every answer an x-request-id header
    (CORS)        Starlette's, when origins are configured; outside the key check, so that preflights pass
    Errors        turns what a route raises into the error object, so that even a 500 has id and CORS headers
    AccessCheck   size of the head, Host header and API key; every route needs the key, but for /health and the files of
                  the live page
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cupyllm.api.body import ClosingResponse
from cupyllm.api.connection import MAX_HEAD_BYTES
from cupyllm.api.errors import ApiError, error_object, json_response
from cupyllm.api.state import state_of

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
PROBES = frozenset({"/health", "/ready"})  # their 503 refuses no request
_HARMLESS_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class RequestIds:
    """Takes the client's x-request-id when it is short and plain, else makes one; sends it back on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _HARMLESS_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {}).update(request_id=request_id, arrived=time.monotonic())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if message["status"] >= 400:
                    self._note_error(scope, message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)

    def _note_error(self, scope: Scope, status: int) -> None:
        method, path, state = scope["method"], scope["path"], scope["state"]
        was_started = state.get("was_started", False)  # then it counts among those that ended with an error
        log.info(
            "%s %.20s %.200r %s with %d",
            state["request_id"],
            method,
            path,
            "failed" if was_started else "refused",
            status,
        )
        if not was_started and path not in PROBES:
            state_of(scope["app"]).metrics.refuse(status)


class Errors:
    """Answers with the error object when a route raises before its answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            log.info("%s the client left before its answer began", scope["state"]["request_id"])
        except Exception as error:
            if scope["type"] != "http" or begun:
                raise
            status, body, headers = error_object(error, scope["state"]["request_id"])
            if headers and headers.get("connection") == "close":
                await ClosingResponse(status, body, headers)(scope, receive, send)
            else:
                await json_response(body, status=status, headers=headers)(scope, receive, send)


class AccessCheck:
    """Refuses requests without a right key, where keys are set, and requests that a foreign web page may have caused.

    A browser can be led to a local server under a name of the attacker's (DNS rebinding; CVE-2024-28224). So a server
    that listens on loopback only and asks for no key answers to the names of loopback and to its own, no others.
    """

    def __init__(self, app: ASGIApp, *, keys: tuple[bytes, ...], open_paths: frozenset[str], host: str) -> None:
        self._app = app
        self._open_paths = open_paths
        self._keys = keys
        is_local = host in _LOOPBACK_NAMES or host == "::1" or host.startswith("127.")
        self._host_names = _LOOPBACK_NAMES | {host.lower()} if is_local and not keys else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _check_size(scope)
            self._check_host(Headers(scope=scope).getlist("host"))
            if self._keys and scope["path"] not in self._open_paths:
                self._check_key(Request(scope))
        await self._app(scope, receive, send)

    def _check_host(self, hosts: list[str]) -> None:
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            raise ApiError(400, "the Host header is missing or malformed")
        if self._host_names is not None and match.group(1).lower() not in self._host_names:
            raise ApiError(
                403,
                "this server answers to localhost only; set an API key or `host` to serve other names",
                code="host_not_allowed",
            )

    def _check_key(self, request: Request) -> None:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        given = credentials.strip().encode("latin-1", "replace")
        # Every key is compared, each in constant time, so that the time tells nothing about them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "Incorrect API key provided" if given else "No API key provided"
            raise ApiError(
                401,
                f"{message}; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _check_size(scope: Scope) -> None:
    """h11 bounds a head that it is waiting for; one that has come in one piece may be longer."""
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise ApiError(400, f"the head of the request is longer than {MAX_HEAD_BYTES} bytes")
