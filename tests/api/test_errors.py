"""Error answers, seen raw and by the official client; models and small routes. Numbers are the HTTP contract's."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

import cupyllm
from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, run_server

CHAT = "/v1/chat/completions"


def test_57_60_the_official_client_reads_the_error_object(server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=3)
    assert (caught.value.param, caught.value.code, caught.value.type) == ("temperature", None, "invalid_request_error")
    assert caught.value.request_id.startswith("req_")


@pytest.mark.parametrize("name", ["nope", "", "tiny/", "TINY"])
def test_61_an_unknown_model_is_404(server: LiveServer, name: str) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "a"})):
        response = server.post(path, body | {"model": name})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "model_not_found")
        assert "this server has 'tiny'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("nope/nope")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(
            ("GET", "/nope", 404),
            ("POST", "/v1/embedding", 404),
            ("GET", "/v1/models/nope", 404),
            ("GET", "/health/", 404),
        ),
        *(("POST", "/v1/chat/completions/", 404), ("GET", CHAT, 405), ("DELETE", CHAT, 405), ("POST", "/health", 405)),
        *(("OPTIONS", CHAT, 405), ("GET", "/%0a%ff", 404)),
    ],
)
def test_61_wrong_routes_and_methods_have_the_error_object(
    server: LiveServer, method: str, path: str, status: int
) -> None:
    response = server.http.request(method, server.url + path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"].startswith("req_")
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-DEF_1", True), ("x" * 64, True), ("x" * 65, False), ("a b", False)]
)
def test_64_the_request_id_is_on_every_answer(server: LiveServer, given: str, echoed: bool) -> None:
    for response in (
        server.get("/health", headers={"x-request-id": given}),
        server.get("/nope", headers={"x-request-id": given}),
        server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "stream": True}, headers={"x-request-id": given}),
    ):
        assert (response.headers["x-request-id"] == given) == echoed
        assert response.headers.get_list("x-request-id") == [response.headers["x-request-id"]]


def test_64_the_official_client_sees_the_request_id(server: LiveServer) -> None:
    answer = server.openai().chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=1)
    assert answer._request_id.startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
def test_66_a_refused_request_has_no_200(server: LiveServer, stream: bool) -> None:
    assert server.post(CHAT, {"messages": [], "stream": stream}).status_code == 400


def test_68_models(server: LiveServer) -> None:
    (model,) = server.openai().models.list().data
    assert (model.id, model.object) == (MODEL_NAME, "model")
    assert isinstance(model.created, int)
    assert isinstance(model.owned_by, str)
    assert server.get("/v1/models").json()["object"] == "list"
    assert server.openai().models.retrieve(MODEL_NAME) == model


@pytest.mark.parametrize("name", ["Qwen/Tiny", "a b/%2F?x#ü+"])
def test_67_a_model_name_may_hold_slashes_and_more(model_folder: Path, name: str) -> None:
    with run_server(model_folder, served_model_name=name) as live:
        assert live.openai().models.retrieve(name).id == name
        assert live.openai().chat.completions.create(model=name, messages=MESSAGES, max_tokens=1).model == name


def test_unknown_fields_are_ignored_when_parameters_are_not_strict(model_folder: Path) -> None:
    with run_server(model_folder, strict_parameters=False) as live:
        assert live.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "foo": {"a": 1}}).status_code == 200
        assert live.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, "audio": {}}).status_code == 400


def test_the_name_of_a_folder_is_the_model_name(model_folder: Path) -> None:
    with run_server(model_folder, served_model_name=None) as live:
        assert live.get("/v1/models").json()["data"][0]["id"] == model_folder.name


def test_health_ready_and_version(server: LiveServer) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/version").json() == {"version": cupyllm.__version__}
