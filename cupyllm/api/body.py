"""From the bytes of a request to a JSON object, with every limit on the way; nothing here knows what the fields mean.

The size is counted while reading, whatever content-length says. Bodies that are slow, too large, compressed, not JSON,
deeply nested, of too many parts, or that hold a key twice or a number JSON does not have, are refused.

Parsing is not done on the event loop, and still holds it up: Python's interpreter lock is held while millions of
objects are made, looked at by the garbage collector, and freed. So the parts are counted before, a little at a time.
"""

from __future__ import annotations

import json
import math
from typing import Any

import anyio
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from cupyllm.api.errors import ApiError, json_response
from cupyllm.errors import RequestError

BODY_SECONDS = 30.0
MAX_DEPTH = 64
MAX_VALUES = 1_048_576  # about as many token ids as Python's json writes into 8 MiB
MAX_CONTAINERS = 131_072  # lists, objects and keys, each of which costs ten times as much
_WINDOW_BYTES = 65_536
_LINGER_SECONDS = 1.0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError: 415 for another content type, 413 above `max_bytes`, 408 after 30 seconds."""
    _check_headers(request, max_bytes)
    received = bytearray()
    with anyio.move_on_after(BODY_SECONDS):
        async for piece in request.stream():
            received += piece
            if len(received) > max_bytes:
                raise _too_large(max_bytes)
        return bytes(received)
    raise ApiError(408, f"the body was not complete after {BODY_SECONDS:g} seconds", headers={"connection": "close"})


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The object in a body. Raises RequestError for anything else. Takes time: not for the event loop."""
    if len(body) > MAX_CONTAINERS:
        _check_counts(body)
    try:
        value = json.loads(
            body.decode(), object_pairs_hook=_object, parse_float=_finite_float, parse_constant=_finite_float
        )
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: byte {error.start} is wrong") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise RequestError(f"the body is nested more than {MAX_DEPTH} deep") from None
    except ValueError:  # Python's limit on the digits of a whole number
        raise RequestError("the body holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    _check_depth(value)
    return value


class ClosingResponse:
    """An error answer after which the connection is closed although the client may still be sending.

    Closing at once would reset the connection, and the client could lose the answer before reading it. So what still
    comes is thrown away for a moment.
    """

    def __init__(self, status: int, body: dict[str, Any], headers: dict[str, str]) -> None:
        self._response = json_response(body, status=status, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self._response.status_code, "headers": self._response.raw_headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": self._response.body, "more_body": True})
        with anyio.move_on_after(_LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass
        await send({"type": "http.response.body", "body": b""})


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content-type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not accepted; leave content-encoding out")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes (max_body_bytes)", headers={"connection": "close"})


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RequestError(f"the body holds the key {twice[:64]!r} twice in one object")
    return value


def _finite_float(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise RequestError(f"the body holds {literal[:40]}, which is not a finite number")
    return number


def _check_counts(body: bytes) -> None:
    """Count what stands outside of texts, up to the first place that is no JSON; parsing goes no further either."""
    num_values = num_containers = start = 0
    in_text = False
    while start < len(body):
        window = body[start : start + _WINDOW_BYTES]
        if (len(window) - len(window.rstrip(b"\\"))) % 2:  # the rest of an escape stands behind the window
            window = body[start : start + _WINDOW_BYTES + 1]
        start += len(window)
        parts = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_text::2])
        in_text ^= len(parts) % 2 == 0
        num_values += outside.count(b",")
        num_containers += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
    if num_containers > MAX_CONTAINERS:
        raise RequestError(f"the body holds {num_containers} lists, objects and keys; at most {MAX_CONTAINERS}")
    if num_values > MAX_VALUES:
        raise RequestError(f"the body holds more than {MAX_VALUES} values")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise RequestError(f"the body is nested more than {MAX_DEPTH} deep")
