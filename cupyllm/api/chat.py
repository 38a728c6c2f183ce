"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from cupyllm.api.body import parse_json_object, read_body
from cupyllm.api.chat_turn import ChatTurn, MessageDelta, finished_messages, message_deltas, prepare_turn, start_turn
from cupyllm.api.errors import json_response
from cupyllm.api.generation import Generation, last_figures, usage_so_far
from cupyllm.api.protocol.beams import read_beams
from cupyllm.api.protocol.chat import ChatRequest, chat_choice, chunk_choice, chunk_delta
from cupyllm.api.protocol.logprobs import chat_logprobs, prompt_logprobs
from cupyllm.api.protocol.shared import read_request
from cupyllm.api.protocol.structured import read_guide
from cupyllm.api.sse import EventStream, unless_client_leaves
from cupyllm.api.state import ServerState, server_state
from cupyllm.output import with_bad_word_ids
from cupyllm.tokenizer import Tokenizer


def routes() -> list[Route]:
    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]


async def chat_completions(request: Request) -> ASGIApp:
    """Answer a conversation, at once or as a stream of chunks."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    ask, turn = await run_in_threadpool(_prepare, body, state)
    generation = await unless_client_leaves(request.receive, start_turn(state, request, turn))
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": state.model_name}
    if ask.stream:
        chunks = _chunks(generation, ask, turn, head, state.loaded.tokenizer)
        return EventStream(chunks, close=generation.close)
    try:
        answering = _answer(generation, ask, turn, head, state.loaded.tokenizer)
        answer = await unless_client_leaves(request.receive, answering)
    finally:
        generation.close()
    return json_response(answer)


def _prepare(body: bytes, state: ServerState) -> tuple[ChatRequest, ChatTurn]:
    """Everything that can refuse the request, but for a full queue. Runs off the event loop: long bodies take time."""
    ask = read_request(ChatRequest, parse_json_object(body), strict=state.config.strict_parameters)
    return ask, prepare_chat(ask, state)


def prepare_chat(ask: ChatRequest, state: ServerState) -> ChatTurn:
    """What is to be answered. Raises RequestError for what can never be."""
    state.check_model_name(ask.model)
    ask.check_limits()
    params = with_bad_word_ids(ask.sampling_params(ask.output_limit), state.loaded.tokenizer)
    params = replace(params, guide=read_guide(ask, state.loaded.guides))
    return prepare_turn(
        state,
        ask.messages,
        params,
        tools=ask.tool_use,
        thinking=ask.thinking,
        add_generation_prompt=ask.add_generation_prompt is not False,
        continue_final_message=ask.continue_final_message,
        priority=ask.priority,
        cache_salt=ask.cache_salt or "",
        beams=read_beams(ask, [params]),
    )


async def _answer(
    generation: Generation, ask: ChatRequest, turn: ChatTurn, head: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    answers = await finished_messages(generation, turn)
    choices = [
        chat_choice(
            index,
            answer.message,
            chat_logprobs(tokenizer, answer.token_ids, [one for delta in answer.deltas for one in delta.logprobs]),
            answer.finish_reason,
        )
        for index, answer in enumerate(answers)
    ]
    result = head | {"object": "chat.completion", "choices": choices, "usage": generation.usage()}
    if ask.prompt_logprobs is not None:
        read = generation.prompt_logprobs(0)
        result["prompt_logprobs"] = prompt_logprobs(tokenizer, turn.prompt_ids, read, ask.prompt_logprobs)
    if ask.return_timings:
        result["timings"] = generation.timings()
    if ask.return_token_ids:
        result["prompt_token_ids"] = turn.prompt_ids
        for choice, answer in zip(choices, answers, strict=True):
            choice["token_ids"] = answer.token_ids
    return result


async def _chunks(
    generation: Generation, ask: ChatRequest, turn: ChatTurn, head: dict[str, Any], tokenizer: Tokenizer
) -> AsyncIterator[dict[str, Any]]:
    """For each choice a chunk with the role, one for each piece of its message, and one with the finish reason; at the
    very end one with usage or timings, if asked.
    """
    head = head | {"object": "chat.completion.chunk"}
    for index in range(ask.n):
        chunk = head | {"choices": [chunk_choice(index, {"role": "assistant", "content": ""})]}
        chunk |= usage_so_far(generation, ask)
        yield chunk | {"prompt_token_ids": turn.prompt_ids} if ask.return_token_ids and index == 0 else chunk
    async for new in message_deltas(generation, turn):
        logprobs = chat_logprobs(tokenizer, new.delta.token_ids, new.delta.logprobs)
        for choice in _chunk_choices(new, logprobs, ask.return_token_ids):
            yield head | {"choices": [choice]} | usage_so_far(generation, ask)
    if ask.include_usage or ask.return_timings:
        yield head | {"choices": []} | last_figures(generation, ask)


def _chunk_choices(new: MessageDelta, logprobs: dict[str, Any] | None, with_token_ids: bool) -> list[dict[str, Any]]:
    """The choices of the chunks that a delta becomes; its token ids and log-probabilities are in the first of them."""
    index = new.delta.choice
    choices = [chunk_choice(index, delta) for delta in map(chunk_delta, new.parts) if delta is not None]
    if new.finish_reason is not None:
        choices.append(chunk_choice(index, {}, new.finish_reason))
    if with_token_ids or logprobs is not None:
        choices = choices or [chunk_choice(index, {})]
        choices[0]["logprobs"] = logprobs
    if with_token_ids:
        for place, choice in enumerate(choices):
            choice["token_ids"] = [] if place else new.delta.token_ids
    return choices
