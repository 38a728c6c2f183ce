"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cupyllm.api.errors import json_response
from cupyllm.api.state import ServerState, server_state


def routes() -> list[Route]:
    # A client sends the slash of "Qwen/Qwen3-8B" as %2F, and frameworks decode it: the id may span path segments.
    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model_id:path}", retrieve_model, methods=["GET"]),
    ]


async def list_models(request: Request) -> Response:
    """The list of served models."""
    return json_response({"object": "list", "data": [_model_card(server_state(request))]})


async def retrieve_model(request: Request) -> Response:
    """One model by its id; 404 (model_not_found) for any other."""
    state = server_state(request)
    state.check_model_name(request.path_params["model_id"])
    return json_response(_model_card(state))


def _model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "cupyllm",
        "max_model_len": state.loaded.engine.max_model_len,
    }
