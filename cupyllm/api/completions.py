"""POST /v1/completions."""

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
from cupyllm.api.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest, text_choice
from cupyllm.api.protocol.shared import read_request
from cupyllm.api.sse import EventStream, unless_client_leaves
from cupyllm.api.state import ServerState, server_state
from cupyllm.errors import RequestError
from cupyllm.sampling import SamplingParams


def routes() -> list[Route]:
    return [Route("/v1/completions", completions, methods=["POST"])]


async def completions(request: Request) -> ASGIApp:
    """Continue one prompt or many, at once or as a stream of chunks."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    ask, prompts, params = await run_in_threadpool(_prepare, body, state)
    generation = await unless_client_leaves(request.receive, start_generation(state, request, prompts, params))
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": state.model_name,
    }
    if ask.stream:
        return EventStream(_chunks(generation, ask, prompts, head), close=generation.close)
    try:
        answer = await unless_client_leaves(request.receive, _answer(generation, ask, prompts, head))
    finally:
        generation.close()
    return json_response(answer)


def _prepare(body: bytes, state: ServerState) -> tuple[CompletionRequest, list[list[int]], list[SamplingParams]]:
    """Everything that can refuse the request, but for a full queue. Runs off the event loop: long bodies take time.

    The text of a control token in a prompt becomes that token: a raw prompt is the caller's to format.
    """
    ask = read_request(CompletionRequest, parse_json_object(body), strict=state.config.strict_parameters)
    state.check_model_name(ask.model)
    given = ask.prompts()
    if len(given) > state.config.max_waiting:
        raise RequestError(
            f"prompt holds {len(given)} prompts; at most {state.config.max_waiting} (max_waiting) can be queued",
            param="prompt",
        )
    try:
        prompts = [state.loaded.tokenizer.encode(one) if isinstance(one, str) else one for one in given]
    except RequestError as error:
        error.param = "prompt"
        raise
    all_params = [_sampling_params(ask, len(prompt), state.loaded.engine.max_model_len) for prompt in prompts]
    for prompt, params in zip(prompts, all_params, strict=True):
        state.loaded.engine.check(prompt, params)
    return ask, prompts, all_params


def _sampling_params(ask: CompletionRequest, prompt_length: int, max_model_len: int) -> SamplingParams:
    if ask.output_limit is not None:
        return ask.sampling_params(ask.output_limit)
    return ask.sampling_params(max(1, min(DEFAULT_MAX_TOKENS, max_model_len - prompt_length)))


async def _answer(
    generation: Generation, ask: CompletionRequest, prompts: list[list[int]], head: dict[str, Any]
) -> dict[str, Any]:
    choices = [text_choice(index, "", None) for index in range(len(prompts))]
    if ask.return_token_ids:
        for choice, prompt in zip(choices, prompts, strict=True):
            choice |= {"token_ids": [], "prompt_token_ids": prompt}
    async for delta in generation.deltas():
        choice = choices[delta.choice]
        choice["text"] += delta.text
        choice["finish_reason"] = delta.finish_reason
        if ask.return_token_ids:
            choice["token_ids"] += delta.token_ids
    return head | {"choices": choices, "usage": generation.usage()}


async def _chunks(
    generation: Generation, ask: CompletionRequest, prompts: list[list[int]], head: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """A chunk for each piece of text, the last of a choice with its finish reason, and one with usage if asked."""
    if ask.include_usage:
        head = head | {"usage": None}
    not_begun = set(range(len(prompts)))
    async for delta in generation.deltas():
        choice = text_choice(delta.choice, delta.text, delta.finish_reason)
        if ask.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.choice in not_begun:
                choice["prompt_token_ids"] = prompts[delta.choice]
        not_begun.discard(delta.choice)
        yield head | {"choices": [choice]}
    if ask.include_usage:
        yield head | {"choices": [], "usage": generation.usage()}
