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
from cupyllm.api.engine_request import EngineRequest
from cupyllm.api.errors import json_response
from cupyllm.api.generation import Generation, start_generation
from cupyllm.api.protocol.beams import read_beams
from cupyllm.api.protocol.chat import ChatRequest, chat_choice, chunk_choice
from cupyllm.api.protocol.shared import read_request
from cupyllm.api.sse import EventStream, unless_client_leaves
from cupyllm.api.state import ServerState, server_state
from cupyllm.errors import RequestError
from cupyllm.messages import normalise_messages


def routes() -> list[Route]:
    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


async def chat_completions(request: Request) -> ASGIApp:
    """Answer a conversation, at once or as a stream of chunks."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    ask, asked = await run_in_threadpool(_prepare, body, state)
    generation = await unless_client_leaves(request.receive, start_generation(state, request, asked))
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": state.model_name}
    (prompt_ids,) = asked.prompts
    if ask.stream:
        return EventStream(_chunks(generation, ask, prompt_ids, head), close=generation.close)
    try:
        answer = await unless_client_leaves(request.receive, _answer(generation, ask, prompt_ids, head))
    finally:
        generation.close()
    return json_response(answer)


def _prepare(body: bytes, state: ServerState) -> tuple[ChatRequest, EngineRequest]:
    """Everything that can refuse the request, but for a full queue. Runs off the event loop: long bodies take time."""
    ask = read_request(ChatRequest, parse_json_object(body), strict=state.config.strict_parameters)
    state.check_model_name(ask.model)
    ask.check_limits()
    params = ask.sampling_params(ask.output_limit)
    beams = read_beams(ask, [params])
    template = state.loaded.chat_template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", param="messages")
    prompt_ids = template.encode(normalise_messages(ask.messages), enable_thinking=ask.enable_thinking)
    asked = EngineRequest([prompt_ids], [params], ask.priority, ask.cache_salt or "", beams)
    try:
        asked.check(state.loaded.engine)
    except RequestError as error:
        if error.param == "prompt":
            error.param = "messages"
        raise
    return ask, asked


async def _answer(
    generation: Generation, ask: ChatRequest, prompt_ids: list[int], head: dict[str, Any]
) -> dict[str, Any]:
    answers = await generation.answers()
    choices = [chat_choice(index, answer.text, answer.finish_reason) for index, answer in enumerate(answers)]
    result = head | {"object": "chat.completion", "choices": choices, "usage": generation.usage()}
    if ask.return_token_ids:
        result["prompt_token_ids"] = prompt_ids
        for choice, answer in zip(choices, answers, strict=True):
            choice["token_ids"] = answer.token_ids
    return result


async def _chunks(
    generation: Generation, ask: ChatRequest, prompt_ids: list[int], head: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """For each choice a chunk with the role, one for each piece of text, and one with the finish reason; at the very
    end one with usage, if asked.
    """
    head = head | {"object": "chat.completion.chunk"}
    if ask.include_usage:
        head["usage"] = None
    for index in range(ask.n):
        chunk = head | {"choices": [chunk_choice(index, {"role": "assistant", "content": ""})]}
        yield chunk | {"prompt_token_ids": prompt_ids} if ask.return_token_ids and index == 0 else chunk
    async for delta in generation.deltas():
        choices = [chunk_choice(delta.choice, {"content": delta.text})] if delta.text else []
        if delta.finish_reason is not None:
            choices.append(chunk_choice(delta.choice, {}, delta.finish_reason))
        for place, choice in enumerate(choices):
            if ask.return_token_ids:
                choice["token_ids"] = [] if place else delta.token_ids  # in the first chunk of the two
            yield head | {"choices": [choice]}
    if ask.include_usage:
        yield head | {"choices": [], "usage": generation.usage()}
