"""A server that speaks the OpenAI API, as a source of answers; with the standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from cupyllm.answer_stream import AnswerPiece
from cupyllm.errors import ConfigError, EngineError

TIMEOUT_SECONDS = 600


class RemoteSource:
    """One model of a server; the first that it lists when none is named. Raises ConfigError when nobody answers."""

    raises_on_interrupt = True

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"--url {url!r}: expected an address such as http://127.0.0.1:8000")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._model = model or self._first_model()
        self.name = f"{self._model} at {url}"

    def answer(self, prompt: str | list[dict[str, Any]], settings: dict[str, Any]) -> Iterator[AnswerPiece]:
        """Stream the answer to a conversation, or the continuation of a text. Raises ConfigError and EngineError."""
        route, field = ("/completions", "prompt") if isinstance(prompt, str) else ("/chat/completions", "messages")
        body = {"model": self._model, field: prompt, "stream": True, "stream_options": {"include_usage": True}}
        num_tokens, has_ended = 0, False
        with self._open(route, body | settings) as response:
            for event in _events(response):
                if "error" in event:
                    raise EngineError(f"{self._base}: {_message(event)}")
                piece = _piece(event, num_tokens)
                num_tokens, has_ended = piece.num_tokens, has_ended or piece.finish_reason is not None
                yield piece
        if not has_ended:
            raise EngineError(f"{self._base}: the answer broke off")

    def _first_model(self) -> str:
        with self._open("/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ConfigError(f"{self._base}/models does not list a model; name one with --model") from None

    @contextmanager
    def _open(self, route: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + route, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                raise ConfigError(f"{self._base}{route} answers {error.code}: {_read_message(error)}") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigError(f"{self._base}{route} cannot be reached: {reason}") from None


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON values of server-sent events, to [DONE] or the end."""
    for line in response:
        name, _, value = line.decode("utf-8", "replace").strip().partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            return
        try:
            event = json.loads(value)
        except ValueError:
            raise EngineError(f"the server sent an event that is not JSON: {value.strip()[:100]}") from None
        if isinstance(event, dict):
            yield event


def _piece(event: dict[str, Any], num_chunks: int) -> AnswerPiece:
    """What a chunk adds. Tokens are those that the server counts, and until it says so one for each chunk with text."""
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    delta = choice.get("delta") or choice
    text = delta.get("content") or delta.get("text") or ""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    counted = (event.get("usage") or {}).get("completion_tokens")
    num_tokens = num_chunks + bool(text or reasoning) if counted is None else counted
    return AnswerPiece(text, num_tokens, choice.get("finish_reason"), reasoning)


def _read_message(error: urllib.error.HTTPError) -> str:
    try:
        return _message(json.load(error))
    except (ValueError, OSError):
        return error.reason


def _message(body: Any) -> str:
    """The text of an error object, in OpenAI's form or one like it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
