"""GET /health, /ready, /metrics and /version. None of them makes the model work, so they answer while it is busy.

/health is for restarting: 503 when the engine is dead, stuck, or fails every step. /ready is for routing: 503 also
while the server is stopping or its queue is full.
"""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import cupyllm
from cupyllm.api.errors import UnavailableError, json_response
from cupyllm.api.state import server_state


def routes() -> list[Route]:
    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
    ]


async def health(request: Request) -> Response:
    """Whether the engine is alive and moving."""
    trouble = server_state(request).worker.trouble()
    if trouble is not None:
        raise UnavailableError(trouble)
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether a request sent now would be taken."""
    state = server_state(request)
    refusal = state.worker.trouble() or state.worker.refusal()
    if refusal is None and state.worker.stats.num_waiting >= state.config.max_waiting:
        refusal = "the waiting queue is full"
    if refusal is not None:
        raise UnavailableError(refusal)
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Counters and histograms for Prometheus."""
    return Response(server_state(request).metrics.text(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


async def version(request: Request) -> Response:
    """The version of cupyllm."""
    return json_response({"version": cupyllm.__version__})
