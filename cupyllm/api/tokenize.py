"""POST /tokenize and /detokenize: text to token ids and back, as the completion routes do it."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cupyllm.api.body import parse_json_object, read_body
from cupyllm.api.errors import json_response
from cupyllm.api.large_answer import large_json_response
from cupyllm.api.protocol.shared import read_request
from cupyllm.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from cupyllm.api.state import ServerState, server_state
from cupyllm.errors import RequestError
from cupyllm.messages import normalise_messages
from cupyllm.tools import normalise_tools


def routes() -> list[Route]:
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    return await run_in_threadpool(_tokenize, body, state)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = server_state(request)
    body = await read_body(request, state.config.max_body_bytes)
    return await run_in_threadpool(_detokenize, body, state)


def _tokenize(body: bytes, state: ServerState) -> Response:
    ask = read_request(TokenizeRequest, parse_json_object(body), strict=state.config.strict_parameters)
    state.check_model_name(ask.model)
    ask.check()
    tokenizer = state.loaded.tokenizer
    ids = _ids_of_text(ask, state) if ask.messages is None else _ids_of_messages(ask, ask.messages, state)
    if ask.wants_special_tokens:
        ids = tokenizer.with_special_tokens(ids)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": state.loaded.engine.max_model_len, "tokens": ids}
    if ask.return_token_strs:
        answer["token_strs"] = [tokenizer.vocabulary_entry(token_id) for token_id in ids]
    return large_json_response(answer)


def _ids_of_text(ask: TokenizeRequest, state: ServerState) -> list[int]:
    name, text = ("prompt", ask.prompt) if ask.prompt is not None else ("content", ask.content or "")
    try:
        return state.loaded.tokenizer.encode(text)
    except RequestError as error:
        error.param = name
        raise


def _ids_of_messages(ask: TokenizeRequest, messages: list[Any], state: ServerState) -> list[int]:
    template = state.loaded.chat_template
    if template is None:
        raise RequestError("this model has no chat template; use prompt", param="messages")
    return template.encode(
        normalise_messages(messages),
        tools=normalise_tools(ask.tools or []),
        add_generation_prompt=ask.add_generation_prompt is not False and not ask.continue_final_message,
        continue_final_message=ask.continue_final_message is True,
        enable_thinking=None if ask.chat_template_kwargs is None else ask.chat_template_kwargs.enable_thinking,
    )


def _detokenize(body: bytes, state: ServerState) -> Response:
    ask = read_request(DetokenizeRequest, parse_json_object(body), strict=state.config.strict_parameters)
    state.check_model_name(ask.model)
    tokenizer = state.loaded.tokenizer
    for place, token_id in enumerate(ask.tokens):
        if token_id >= tokenizer.num_tokens:
            name = f"tokens[{place}]"
            raise RequestError(f"{name} is {token_id}; the ids are below {tokenizer.num_tokens}", param=name)
    return json_response({"prompt": tokenizer.decode(ask.tokens, skip_special_tokens=False)})
