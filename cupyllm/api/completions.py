"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from cupyllm.api.body import parse_json_object, read_body
from cupyllm.api.engine_request import EngineRequest
from cupyllm.api.errors import json_response
from cupyllm.api.generation import Answer, Delta, Generation, last_figures, start_generation, usage_so_far
from cupyllm.api.protocol.beams import read_beams
from cupyllm.api.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest, text_choice
from cupyllm.api.protocol.logprobs import TextLogprobs, prompt_logprobs
from cupyllm.api.protocol.shared import read_request
from cupyllm.api.protocol.structured import read_guide
from cupyllm.api.sse import EventStream, unless_client_leaves
from cupyllm.api.state import ServerState, server_state
from cupyllm.errors import RequestError
from cupyllm.output import with_bad_word_ids
from cupyllm.sampling import SamplingParams
from cupyllm.tokenizer import Tokenizer


def routes() -> list[Route]:
    return [Route("/v1/completions", completions, methods=["POST"])]


@dataclass(frozen=True)
class _Prepared:
    """A request that has been checked. `echoes` are the texts of the prompts, empty where they are not to be shown."""

    ask: CompletionRequest
    asked: EngineRequest
    echoes: list[str]


async def completions(request: Request) -> ASGIApp:
    """Continue one prompt or many, at once or as a stream of chunks."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    prepared = await run_in_threadpool(_prepare, body, state)
    generation = await unless_client_leaves(request.receive, start_generation(state, request, prepared.asked))
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": state.model_name,
    }
    writer = _Writer(generation, prepared, state.loaded.tokenizer)
    if prepared.ask.stream:
        return EventStream(_chunks(writer, head), close=generation.close)
    try:
        answer = await unless_client_leaves(request.receive, _answer(writer, head))
    finally:
        generation.close()
    return json_response(answer)


def _prepare(body: bytes, state: ServerState) -> _Prepared:
    """Everything that can refuse the request, but for a full queue. Runs off the event loop: long bodies take time."""
    ask = read_request(CompletionRequest, parse_json_object(body), strict=state.config.strict_parameters)
    state.check_model_name(ask.model)
    given = ask.prompts()
    if len(given) > state.config.max_waiting:
        raise RequestError(
            f"prompt holds {len(given)} prompts; at most {state.config.max_waiting} (max_waiting) can be queued",
            param="prompt",
        )
    prompts = [_prompt_ids(one, ask.suffix, state.loaded.tokenizer) for one in given]
    all_params = [_sampling_params(ask, len(prompt), state) for prompt in prompts]
    guide = read_guide(ask, state.loaded.guides)
    all_params = [replace(params, guide=guide) for params in all_params]
    asked = EngineRequest(prompts, all_params, ask.priority, ask.cache_salt or "", read_beams(ask, all_params))
    try:
        asked.check(state.loaded.engine)
    except RequestError as error:
        if error.param == "n" and ask.best_of is not None:
            error.param = "best_of"
        raise
    return _Prepared(ask, asked, [_echo(one, ask, state.loaded.tokenizer) for one in given])


def _prompt_ids(prompt: str | list[int], suffix: str | None, tokenizer: Tokenizer) -> list[int]:
    """The text of a control token in a prompt becomes that token: a raw prompt is the caller's to format.

    With a suffix the model is asked for what stands between, in the way Qwen2.5-Coder was trained for.
    """
    try:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    except RequestError as error:
        error.param = "prompt"
        raise
    if not suffix:
        return ids
    marks = [tokenizer.added_tokens.get(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")]
    if None in marks:
        raise RequestError("this model has no marks for filling in the middle; leave suffix out", param="suffix")
    try:
        return [marks[0], *ids, marks[1], *tokenizer.encode(suffix), marks[2]]  # type: ignore[list-item]
    except RequestError as error:
        error.param = "suffix"
        raise


def _echo(prompt: str | list[int], ask: CompletionRequest, tokenizer: Tokenizer) -> str:
    if not ask.echo:
        return ""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)


def _sampling_params(ask: CompletionRequest, prompt_length: int, state: ServerState) -> SamplingParams:
    limit = ask.output_limit
    if limit is None:
        limit = max(1, min(DEFAULT_MAX_TOKENS, state.loaded.engine.max_model_len - prompt_length))
    return with_bad_word_ids(ask.sampling_params(limit), state.loaded.tokenizer)


class _Writer:
    """Writes choices: what is asked for beside the text, and the prompt before it where it is to be echoed."""

    def __init__(self, generation: Generation, prepared: _Prepared, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self.ask = prepared.ask
        self.asked = prepared.asked
        self._echoes = prepared.echoes
        self._tokenizer = tokenizer
        self._logprobs: dict[int, TextLogprobs] = {}  # by choice, once it has begun

    def choice(
        self, index: int, prompt_number: int, text: str, part: Answer | Delta, finish_reason: str | None
    ) -> dict[str, Any]:
        """A choice, or the next piece of one; `part` has its tokens. The first piece has what belongs to the prompt."""
        is_first = index not in self._logprobs
        writer = self._logprobs.setdefault(index, TextLogprobs(self._tokenizer, self.ask.logprobs or 0))
        prompt_ids = self.asked.prompts[prompt_number]
        choice = text_choice(index, self._echoes[prompt_number] + text if is_first else text, None, finish_reason)
        if self.ask.logprobs is not None:
            shown = self._prompt_logprobs(writer, prompt_number) if is_first and self.ask.echo else {}
            own = writer.show(part.token_ids, part.logprobs)
            choice["logprobs"] = {name: shown.get(name, []) + values for name, values in own.items()}
        if self.ask.return_token_ids:
            choice |= {"token_ids": part.token_ids} | ({"prompt_token_ids": prompt_ids} if is_first else {})
        if self.ask.prompt_logprobs is not None:
            read = self.generation.prompt_logprobs(prompt_number)
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt_ids, read, self.ask.prompt_logprobs)
        return choice

    def _prompt_logprobs(self, writer: TextLogprobs, prompt_number: int) -> dict[str, Any]:
        prompt_ids, read = self.asked.prompts[prompt_number], self.generation.prompt_logprobs(prompt_number)
        return writer.show(prompt_ids, read, is_prompt=True)


async def _answer(writer: _Writer, head: dict[str, Any]) -> dict[str, Any]:
    ask, n = writer.ask, writer.asked.n
    answers = await writer.generation.answers()
    choices: list[dict[str, Any]] = []
    for number in range(len(writer.asked.prompts)):
        own = answers[number * n : (number + 1) * n]
        for answer in _best(own)[: ask.n] if ask.best_of is not None else own:
            choices.append(writer.choice(len(choices), number, answer.text, answer, answer.finish_reason))
    timings = {"timings": writer.generation.timings()} if ask.return_timings else {}
    return head | {"choices": choices, "usage": writer.generation.usage()} | timings


def _best(answers: list[Answer]) -> list[Answer]:
    """Most likely first, by the mean over their tokens: a sum would favour short answers."""
    return sorted(answers, key=lambda answer: -answer.mean_logprob)


async def _chunks(writer: _Writer, head: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """A chunk for each piece of text, the last of a choice with its finish reason, and one with usage or timings if
    asked.
    """
    ask = writer.ask
    async for delta in writer.generation.deltas():
        choice = writer.choice(delta.choice, delta.choice // ask.n, delta.text, delta, delta.finish_reason)
        yield head | {"choices": [choice]} | usage_so_far(writer.generation, ask)
    if ask.include_usage or ask.return_timings:
        yield head | {"choices": []} | last_figures(writer.generation, ask)
