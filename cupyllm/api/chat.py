"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from cupyllm.api.body import parse_json_object, read_body
from cupyllm.api.errors import json_response
from cupyllm.api.generation import Generation, start_generation
from cupyllm.api.protocol.chat import ChatRequest, chat_choice, chunk_choice
from cupyllm.api.protocol.shared import read_request
from cupyllm.api.sse import EventStream, unless_client_leaves
from cupyllm.api.state import ServerState, server_state
from cupyllm.errors import RequestError
from cupyllm.messages import normalise_messages
from cupyllm.sampling import SamplingParams


def routes() -> list[Route]:
    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


async def chat_completions(request: Request) -> ASGIApp:
    """Answer a conversation, at once or as a stream of chunks."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    ask, prompt_ids, params = await run_in_threadpool(_prepare, body, state)
    start = start_generation(state, request, [prompt_ids], [params])
    generation = await unless_client_leaves(request.receive, start)
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": state.model_name}
    if ask.stream:
        return EventStream(_chunks(generation, ask, prompt_ids, head), close=generation.close)
    try:
        answer = await unless_client_leaves(request.receive, _answer(generation, ask, prompt_ids, head))
    finally:
        generation.close()
    return json_response(answer)


def _prepare(body: bytes, state: ServerState) -> tuple[ChatRequest, list[int], SamplingParams]:
    """Everything that can refuse the request, but for a full queue. Runs off the event loop: long bodies take time."""
    ask = read_request(ChatRequest, parse_json_object(body), strict=state.config.strict_parameters)
    state.check_model_name(ask.model)
    ask.check_limits()
    params = ask.sampling_params(ask.output_limit)
    template = state.loaded.chat_template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", param="messages")
    prompt_ids = template.encode(normalise_messages(ask.messages), enable_thinking=ask.enable_thinking)
    try:
        state.loaded.engine.check(prompt_ids, params)
    except RequestError as error:
        if error.param == "prompt":
            error.param = "messages"
        raise
    return ask, prompt_ids, params


async def _answer(
    generation: Generation, ask: ChatRequest, prompt_ids: list[int], head: dict[str, Any]
) -> dict[str, Any]:
    text, token_ids, finish_reason = "", [], ""
    async for delta in generation.deltas():
        text += delta.text
        token_ids += delta.token_ids
        finish_reason = delta.finish_reason or finish_reason
    choice = chat_choice(text, finish_reason, token_ids if ask.return_token_ids else None)
    answer = head | {"object": "chat.completion", "choices": [choice], "usage": generation.usage()}
    return answer | {"prompt_token_ids": prompt_ids} if ask.return_token_ids else answer


async def _chunks(
    generation: Generation, ask: ChatRequest, prompt_ids: list[int], head: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """A chunk with the role, one for each piece of text, one with the finish reason, and one with usage if asked."""
    head = head | {"object": "chat.completion.chunk"}
    if ask.include_usage:
        head["usage"] = None
    first = head | {"choices": [chunk_choice({"role": "assistant", "content": ""})]}
    yield first | {"prompt_token_ids": prompt_ids} if ask.return_token_ids else first
    async for delta in generation.deltas():
        token_ids = delta.token_ids if ask.return_token_ids else None
        if delta.text:
            yield head | {"choices": [chunk_choice({"content": delta.text}, token_ids=token_ids)]}
            token_ids = [] if ask.return_token_ids else None
        if delta.finish_reason is not None:
            yield head | {"choices": [chunk_choice({}, finish_reason=delta.finish_reason, token_ids=token_ids)]}
    if ask.include_usage:
        yield head | {"choices": [], "usage": generation.usage()}
