"""API keys, CORS and host names, over every route the application has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, raw_connection, run_server

KEYS = ["sk-first", "zweiter-schlüssel"]
ORIGIN = "https://example.com"


@pytest.fixture(scope="module")
def guarded(model_folder: Path) -> Iterator[LiveServer]:
    """A server with two keys and one allowed origin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEYS_OF_THIS_TEST", f" {KEYS[0]}, {KEYS[1]},")
        with run_server(model_folder, cors_origins=(ORIGIN,), api_key_env="KEYS_OF_THIS_TEST") as live:
            yield live


def request(server: LiveServer, method: str, path: str, **headers: str | bytes) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.request(method, server.url + path.replace("{model_id:path}", "a/b"), headers=given)


OPEN = {"/health", "/", "/static/main.js"}  # the files of the live page hold nothing of the server's
WRONG = [None, "", "Bearer", "Bearer wrong", "Bearer sk-firs", "Bearer sk-first2", "Basic sk-first"]
WRONG += ["sk-first", "Bearer sk-first sk-first", "Bearer sk-first,zweiter", "Bearer ,", b"Bearer \xff\xfe"]


@pytest.mark.parametrize("credentials", WRONG)
def test_63_every_route_but_health_and_the_page_needs_a_right_key(guarded: LiveServer, credentials: Any) -> None:
    headers = {} if credentials is None else {"authorization": credentials}
    paths = {path for _, path in guarded.routes} | {
        "/static/main.js",
        "/static/",
        "/static/nope.js",
        "/static//main.js",
        "/nope",
        "/v1",
        "/health/",
        "//health",
        "/HEALTH",
        "/health%2f",
    }
    for path in paths:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            status = guarded.status(method, path, headers)
            if path in OPEN:
                assert status == (200 if method in ("GET", "HEAD") else 405)
            else:
                assert status == 401, (method, path)


def test_63_the_error_of_a_wrong_key(guarded: LiveServer) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        guarded.openai(api_key="wrong").models.list()
    assert (caught.value.code, caught.value.type, caught.value.param) == (
        "invalid_api_key",
        "invalid_request_error",
        None,
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_opens_every_route(guarded: LiveServer, key: str, scheme: str) -> None:
    for method, path in guarded.routes:
        path = path.replace("{model_id:path}", "a/b")
        status = guarded.status(method, path, {"authorization": f"{scheme} {key}".encode()})
        assert status in (200, 404, 415), (method, path)


def test_a_preflight_passes_without_a_key(guarded: LiveServer) -> None:
    wanted = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    asks = {"origin": ORIGIN, "access_control_request_method": "POST", "access_control_request_headers": wanted}
    for _, path in guarded.routes:
        response = request(guarded, "OPTIONS", path, **asks)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in response.headers["access-control-allow-methods"]
        allowed = response.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
        assert set(wanted.split(",")) <= set(allowed)


def test_cors_headers_are_on_answers_errors_and_streams(guarded: LiveServer) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    body = {"messages": MESSAGES, "max_tokens": 1}
    responses = [
        request(guarded, "GET", "/v1/models", origin=ORIGIN),
        request(guarded, "GET", "/nope", origin=ORIGIN, **key),
        guarded.post("/v1/chat/completions", body, headers=key | {"origin": ORIGIN}),
        guarded.post("/v1/chat/completions", body | {"stream": True}, headers=key | {"origin": ORIGIN}),
        guarded.post("/v1/chat/completions", body | {"n": 17}, headers=key | {"origin": ORIGIN}),
    ]
    assert [response.status_code for response in responses] == [401, 404, 200, 200, 400]
    assert all(response.headers["access-control-allow-origin"] == ORIGIN for response in responses)
    foreign = request(guarded, "GET", "/v1/models", origin="https://evil.example", **key)
    assert "access-control-allow-origin" not in foreign.headers


def test_cors_is_off_by_default(server: LiveServer) -> None:
    assert "access-control-allow-origin" not in request(server, "GET", "/v1/models", origin=ORIGIN).headers
    preflight = request(server, "OPTIONS", "/v1/models", origin=ORIGIN, access_control_request_method="GET")
    assert preflight.status_code == 405


LOCAL = ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]", "[::1]:8000"]
FOREIGN = ["example.com", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "169.254.169.254"]
MALFORMED = [
    "",
    "a/b",
    "a?b",
    "a#b",
    "a@b",
    "localhost/..",
    "localhost:x",
    "localhost:",
    "a b",
    "[::1",
    "127.0.0.1\t/x",
]


def status_with_host(server: LiveServer, *hosts: str, path: str = "/v1/models") -> int:
    lines = [f"GET {path} HTTP/1.1", "connection: close", *(f"host: {host}" for host in hosts)]
    with raw_connection(server) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        return int(connection.recv(65536).split()[1])


@pytest.mark.parametrize(
    ("hosts", "status"), [*((LOCAL, 200), (FOREIGN, 403), (MALFORMED, 400))], ids=["local", "foreign", "malformed"]
)
def test_a_local_server_without_keys_answers_to_local_names_only(
    server: LiveServer, hosts: list[str], status: int
) -> None:
    assert {host: status_with_host(server, host) for host in hosts} == dict.fromkeys(hosts, status)


def test_a_server_with_keys_answers_to_any_name_but_not_without_key(guarded: LiveServer) -> None:
    assert {host: status_with_host(guarded, host) for host in FOREIGN} == dict.fromkeys(FOREIGN, 401)
    assert {host: status_with_host(guarded, host) for host in MALFORMED} == dict.fromkeys(MALFORMED, 400)
    assert status_with_host(guarded, "example.com", path="/health") == 200


def test_no_or_two_host_headers_are_refused(server: LiveServer) -> None:
    assert status_with_host(server) == 400
    assert status_with_host(server, "localhost", "localhost") == 400


def test_the_key_opens_the_official_client(guarded: LiveServer) -> None:
    client = guarded.openai(api_key=KEYS[0])
    assert client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=1).choices
