"""POST /v1/responses: the chat route under OpenAI's newer interface. Nothing is kept between requests."""

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
from cupyllm.api.chat import prepare_chat
from cupyllm.api.chat_turn import ChatTurn, message_deltas, start_turn
from cupyllm.api.errors import json_response
from cupyllm.api.generation import Generation
from cupyllm.api.protocol.chat import ChatRequest
from cupyllm.api.protocol.logprobs import chat_logprobs
from cupyllm.api.protocol.responses import ChatForm, ResponsesRequest
from cupyllm.api.protocol.shared import read_request
from cupyllm.api.response_writer import ResponseWriter
from cupyllm.api.sse import EventStream, unless_client_leaves
from cupyllm.api.state import ServerState, server_state
from cupyllm.errors import DeadEndError, EngineError, RequestError
from cupyllm.tokenizer import Tokenizer

Json = dict[str, Any]


def routes() -> list[Route]:
    return [Route("/v1/responses", create_response, methods=["POST"])]


async def create_response(request: Request) -> ASGIApp:
    """Answer a conversation with output items, at once or as a stream of events."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    ask, as_chat, turn = await run_in_threadpool(_prepare, body, state)
    generation = await unless_client_leaves(request.receive, start_turn(state, request, turn))
    writer = ResponseWriter(_begun(ask, turn, state))
    message_events = _message_events(generation, turn, writer, state.loaded.tokenizer)
    events = _with_failures(message_events, as_chat, writer, request.state.request_id)
    if ask.stream:
        return EventStream(events, close=generation.close, named=True)
    try:
        await unless_client_leaves(request.receive, _exhaust(events))
    finally:
        generation.close()
    return json_response(writer.response)


def _prepare(body: bytes, state: ServerState) -> tuple[ResponsesRequest, ChatForm, ChatTurn]:
    """Everything that can refuse the request, but for a full queue. Runs off the event loop: long bodies take time."""
    ask = read_request(ResponsesRequest, parse_json_object(body), strict=state.config.strict_parameters)
    as_chat = ask.as_chat_request()
    try:
        return ask, as_chat, prepare_chat(read_request(ChatRequest, as_chat.body, strict=True), state)
    except RequestError as error:
        raise as_chat.in_own_names(error) from None


async def _message_events(
    generation: Generation, turn: ChatTurn, writer: ResponseWriter, tokenizer: Tokenizer
) -> AsyncIterator[Json]:
    """The events of an answer. Raises what Generation.deltas raises."""
    for event in writer.begin():
        yield event
    async for new in message_deltas(generation, turn):
        logprobs = chat_logprobs(tokenizer, new.delta.token_ids, new.delta.logprobs)
        for event in writer.add(new.parts, [] if logprobs is None else logprobs["content"]):
            yield event
        finish_reason = new.finish_reason
    for event in writer.finish(finish_reason or "", _usage(generation)):
        yield event


async def _with_failures(
    events: AsyncIterator[Json], as_chat: ChatForm, writer: ResponseWriter, request_id: str
) -> AsyncIterator[Json]:
    """The same events; where the answer fails, a last one says so, before the error itself goes on."""
    try:
        async for event in events:
            yield event
    except DeadEndError as error:
        own = as_chat.in_own_names(error)
        for event in writer.fail(own.message, code="invalid_prompt"):
            yield event
        raise own from None
    except EngineError:
        for event in writer.fail(f"the engine failed; request id {request_id}"):
            yield event
        raise


async def _exhaust(events: AsyncIterator[Json]) -> None:
    async for _ in events:
        pass


def _begun(ask: ResponsesRequest, turn: ChatTurn, state: ServerState) -> Json:
    """The response as it is before any output: what was asked for, with the values that apply."""
    params = turn.asked.params[0].filled(state.loaded.engine.admission.defaults)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": state.model_name,
        "error": None,
        "incomplete_details": None,
        "instructions": ask.instructions,
        "max_output_tokens": ask.max_output_tokens,
        "metadata": ask.metadata or {},
        "parallel_tool_calls": ask.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if ask.reasoning is None else ask.reasoning.effort, "summary": None},
        "store": False,
        "temperature": 1.0 if params.temperature is None else params.temperature,
        "text": {"format": (ask.text and ask.text.format) or {"type": "text"}},
        "tool_choice": ask.tool_choice or "auto",
        "top_logprobs": ask.top_logprobs or 0,
        "tools": list(ask.function_tools().values()),
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "truncation": "disabled",
    }


def _usage(generation: Generation) -> Json:
    usage = generation.usage()
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        # What is written to the cache costs nothing here; OpenAI's client wants the key.
        "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
