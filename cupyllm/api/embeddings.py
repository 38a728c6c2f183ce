"""POST /v1/embeddings: texts to vectors. A long list goes to the engine in groups, so that it cannot fill the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cupyllm.api.body import parse_json_object, read_body
from cupyllm.api.engine_request import EngineRequest
from cupyllm.api.large_answer import large_json_response
from cupyllm.api.live_request import LiveRequest
from cupyllm.api.protocol.embeddings import EmbeddingRequest, encoded
from cupyllm.api.protocol.shared import read_request
from cupyllm.api.request_log import RequestLog
from cupyllm.api.sse import unless_client_leaves
from cupyllm.api.state import ServerState, server_state
from cupyllm.errors import EngineError, RequestError
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason

_GROUP_SIZE = 64
_READ_ONLY = SamplingParams(max_tokens=0)


def routes() -> list[Route]:
    return [Route("/v1/embeddings", embeddings, methods=["POST"])]


async def embeddings(request: Request) -> Response:
    """Turn texts into vectors."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    asked = await run_in_threadpool(_prepare, body, state)
    vectors = await unless_client_leaves(request.receive, _embed(asked, state, request))
    return await run_in_threadpool(_answer, asked, vectors, state)


@dataclass(frozen=True)
class _Asked:
    """A request that can be served, in groups that go to the engine one after another."""

    ask: EmbeddingRequest
    groups: list[EngineRequest]

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt) for group in self.groups for prompt in group.prompts)


def _prepare(body: bytes, state: ServerState) -> _Asked:
    """Everything that can refuse the request, but for a full queue. Runs off the event loop: long bodies take time."""
    ask = read_request(EmbeddingRequest, parse_json_object(body), strict=state.config.strict_parameters)
    state.check_model_name(ask.model)
    engine, tokenizer = state.loaded.engine, state.loaded.tokenizer
    state.loaded.embedding.check(ask.dimensions, engine.runner.model.config.hidden_size)
    prompts = []
    for place, given in enumerate(inputs := ask.inputs()):
        try:
            prompt = tokenizer.encode(given) if isinstance(given, str) else given
            if isinstance(given, str) and ask.add_special_tokens:
                prompt = tokenizer.with_special_tokens(prompt)
            engine.check(prompt, _READ_ONLY)
        except RequestError as error:
            error.param = "input" if len(inputs) == 1 else f"input[{place}]"
            raise
        prompts.append(prompt)
    size = min(_GROUP_SIZE, state.config.max_waiting)
    starts = range(0, len(prompts), size)
    groups = [_group(prompts[start : start + size], ask.priority, state) for start in starts]
    return _Asked(ask, groups)


def _group(prompts: list[list[int]], priority: int, state: ServerState) -> EngineRequest:
    pooling = state.loaded.embedding.pooling
    return EngineRequest(prompts, [_READ_ONLY] * len(prompts), priority, pooling=pooling)


async def _embed(asked: _Asked, state: ServerState, request: Request) -> list[np.ndarray]:
    """The pooled hidden state of every input. Raises what EngineWorker.submit raises, and EngineError."""
    first, *others = asked.groups
    live = await state.worker.submit(first)
    request_log, works = RequestLog(state, request, asked.num_tokens), [live.work]
    reason = FinishReason.ABORT
    try:
        pooled = await _vectors(live)
        for group in others:
            live = await state.worker.submit(group)
            works.append(live.work)
            pooled += await _vectors(live)
        if not all(np.isfinite(vector).all() for vector in pooled):
            raise EngineError("the model gave no finite hidden states; the checkpoint or its dtype is damaged")
        reason = FinishReason.STOP
        return pooled
    except EngineError:
        reason = FinishReason.ERROR
        raise
    finally:
        request_log.end(works, {reason}, [])


async def _vectors(live: LiveRequest) -> list[np.ndarray]:
    try:
        for _ in live.asked.prompts:
            await live.next_event()
        return live.work.embeddings()
    finally:
        live.close()


def _answer(asked: _Asked, pooled: list[np.ndarray], state: ServerState) -> Response:
    ask, recipe = asked.ask, state.loaded.embedding
    data: list[dict[str, Any]] = []
    for index, vector in enumerate(pooled):
        embedding = encoded(recipe.finish(vector, ask.dimensions), ask.encoding_format)
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    usage = {"prompt_tokens": asked.num_tokens, "total_tokens": asked.num_tokens}
    return large_json_response({"object": "list", "data": data, "model": state.model_name, "usage": usage})
