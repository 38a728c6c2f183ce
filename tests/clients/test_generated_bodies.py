"""Bodies made by schemathesis from the server's own description: a thousand of them, right and wrong ones.

What every answer must be like is held by the hook of LiveServer.http: as described, and the error object when refused.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.api.live_server import LiveServer, frames
from tests.proof.scale import pick

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install schemathesis")

ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]
BODIES = pick(100, 10_000)  # of each of the two kinds for each route
LEAKS = ("Traceback", "site-packages", "<class", " object at 0x", "pydantic", "starlette")
CONTROL = {"prompt": "the weather", "temperature": 0, "max_tokens": 4}


def test_every_route_that_takes_a_body_is_among_them(server: LiveServer) -> None:
    assert {path for method, path in server.routes if method == "POST"} == set(ROUTES)


@pytest.mark.parametrize("kind", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("path", ROUTES)
def test_20_no_generated_body_makes_a_fault_or_an_answer_of_another_shape(
    server: LiveServer, path: str, kind: str
) -> None:
    expected = server.post("/v1/completions", CONTROL).json()["choices"]
    operation = schemathesis.openapi.from_dict(server.get("/openapi.json").json())[path]["POST"]
    seen: list[int] = []

    @settings(
        max_examples=BODIES,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode[kind]))
    def send(case: Any) -> None:
        content = json.dumps(case.body if isinstance(case.body, dict | list | str | int | float) else None)
        response = server.http.post(server.url + path, content=content, headers={"content-type": "application/json"})
        seen.append(response.status_code)
        assert response.status_code in (200, 400, 404), response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            assert "error" not in frames(response)[-1]
        if response.status_code != 200:
            message = response.json()["error"]["message"]
            assert not [leak for leak in LEAKS if leak in message], message
        if len(seen) % 50 == 0:
            assert server.post("/v1/completions", CONTROL).json()["choices"] == expected

    send()
    assert len(seen) >= BODIES
    assert 400 in seen
    assert kind == "NEGATIVE" or 200 in seen, "not one of the right bodies was taken"
