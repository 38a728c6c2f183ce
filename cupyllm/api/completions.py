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
from cupyllm.api.engine_request import EngineRequest
from cupyllm.api.errors import json_response
from cupyllm.api.generation import Answer, Generation, start_generation
from cupyllm.api.protocol.beams import read_beams
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
    ask, asked = await run_in_threadpool(_prepare, body, state)
    generation = await unless_client_leaves(request.receive, start_generation(state, request, asked))
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": state.model_name,
    }
    if ask.stream:
        return EventStream(_chunks(generation, ask, asked.prompts, head), close=generation.close)
    try:
        answer = await unless_client_leaves(request.receive, _answer(generation, ask, asked, head))
    finally:
        generation.close()
    return json_response(answer)


def _prepare(body: bytes, state: ServerState) -> tuple[CompletionRequest, EngineRequest]:
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
    asked = EngineRequest(prompts, all_params, ask.priority, ask.cache_salt or "", read_beams(ask, all_params))
    try:
        asked.check(state.loaded.engine)
    except RequestError as error:
        if error.param == "n" and ask.best_of is not None:
            error.param = "best_of"
        raise
    return ask, asked


def _sampling_params(ask: CompletionRequest, prompt_length: int, max_model_len: int) -> SamplingParams:
    if ask.output_limit is not None:
        return ask.sampling_params(ask.output_limit)
    return ask.sampling_params(max(1, min(DEFAULT_MAX_TOKENS, max_model_len - prompt_length)))


async def _answer(
    generation: Generation, ask: CompletionRequest, asked: EngineRequest, head: dict[str, Any]
) -> dict[str, Any]:
    answers = await generation.answers()
    choices: list[dict[str, Any]] = []
    for number, prompt in enumerate(asked.prompts):
        own = answers[number * asked.n : (number + 1) * asked.n]
        for answer in _best(own)[: ask.n] if ask.best_of is not None else own:
            choice = text_choice(len(choices), answer.text, answer.finish_reason)
            if ask.return_token_ids:
                choice |= {"token_ids": answer.token_ids, "prompt_token_ids": prompt}
            choices.append(choice)
    return head | {"choices": choices, "usage": generation.usage()}


def _best(answers: list[Answer]) -> list[Answer]:
    """Most likely first, by the mean over their tokens: a sum would favour short answers."""
    return sorted(answers, key=lambda answer: -answer.mean_logprob)


async def _chunks(
    generation: Generation, ask: CompletionRequest, prompts: list[list[int]], head: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """A chunk for each piece of text, the last of a choice with its finish reason, and one with usage if asked."""
    if ask.include_usage:
        head = head | {"usage": None}
    not_begun = set(range(len(prompts) * ask.n))
    async for delta in generation.deltas():
        choice = text_choice(delta.choice, delta.text, delta.finish_reason)
        if ask.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.choice in not_begun:
                choice["prompt_token_ids"] = prompts[delta.choice // ask.n]
        not_begun.discard(delta.choice)
        yield head | {"choices": [choice]}
    if ask.include_usage:
        yield head | {"choices": [], "usage": generation.usage()}
