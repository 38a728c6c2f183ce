"""The live page's files, and the stream of steps behind it, over HTTP. tests/browser has the page itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cupyllm.api import live_view
from cupyllm.step_trace import StepRecord
from tests.api.live_server import MESSAGES, LiveServer, run_server, wait_until

STATIC = Path(live_view.__file__).parent / "static"
CHAT = "/v1/chat/completions"


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream that has no end, each held against /openapi.json."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    description = response.extensions["description"]
    schema = description.document["paths"]["/live/steps"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    for line in response.iter_lines():
        if line.startswith("data: "):
            event = json.loads(line[6:])
            description.check_value(event, schema["x-event-schema"])
            yield event


def steps_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of an event, each whole."""
    whole, last = [], {}
    for change in event.get("steps", []):
        whole.append(last := last | change)
    assert all(step.keys() == set(StepRecord._fields) for step in whole)
    return whole


def apply(pages: dict[int, list[Any]], event: dict[str, Any]) -> None:
    if event["type"] == "snapshot":
        pages.clear()
        pages.update({use[0]: use for use in event["snapshot"]["pages"]})
    pages.update({use[0]: use for step in steps_of(event) for use in step["page_changes"]})


def is_watched(server: LiveServer) -> bool:
    return server.loaded.engine.observer is not None


def test_the_page_and_its_files(server: LiveServer) -> None:
    page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    imported = [
        f"/static/{name}" for path in STATIC.glob("*.js") for name in re.findall(r'from "\./(.+)"', path.read_text())
    ]
    assert {f"/static/{path.name}" for path in STATIC.iterdir()} - {"/static/index.html"} == {*named, *imported}
    for path in {*named, *imported}:
        response = server.get(path)
        assert response.status_code == 200
        assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_may_run_only_its_own_scripts(server: LiveServer) -> None:
    page = server.get("/")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy["script-src"], policy["style-src"], policy["connect-src"], policy["img-src"]} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert re.findall(r"<script(?![^>]* src=)", page.text) == []
    assert re.findall(r"\s(?:on\w+|style)=", page.text) == []
    for path in STATIC.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", path.read_text().split("\n", 1)[1]
        )


@pytest.mark.parametrize("name", ["nope.js", "%2e%2e", "%2e%2e%2fapp.py", "..%2flive_view.py", "a%00b.js"])
def test_no_other_file_can_be_read(server: LiveServer, name: str) -> None:
    assert server.get(f"/static/{name}").status_code == 404


def test_the_stream_tells_what_a_request_does(server: LiveServer) -> None:
    pages: dict[int, list[Any]] = {}
    with server.http.stream("GET", f"{server.url}/live/steps") as stream:
        arriving = events(stream)
        first = next(arriving)
        assert first["type"] == "snapshot"
        assert first["snapshot"]["num_pages"] == server.loaded.engine.scheduler.allocator.num_pages
        apply(pages, first)
        usage = server.post(CHAT, {"messages": MESSAGES, "n": 2, "max_tokens": 5, "ignore_eos": True}).json()["usage"]
        steps: list[dict[str, Any]] = []
        shared = 0
        for event in arriving:
            apply(pages, event)
            steps += steps_of(event)
            shared += sum(len(use[3]) == 2 for step in steps_of(event) for use in step["page_changes"])
            if sum(len(step["ended"]) for step in steps) == 2:
                break
    assert sum(len(step["token_ids"]) for step in steps) == usage["completion_tokens"] == 10
    computed = sum(length for step in steps for _, _, length in step["chunks"])
    assert computed == usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert [len(step["forks"]) for step in steps if step["forks"]] == [1]
    assert shared > 0
    assert sum(use[1] == "live" for use in pages.values()) == 0
    assert sum(use[1] == "cached" for use in pages.values()) == server.loaded.engine.stats.num_cached_pages


def test_an_abort_while_nothing_else_runs_is_told(server: LiveServer) -> None:
    with server.http.stream("GET", f"{server.url}/live/steps") as stream:
        arriving = events(stream)
        next(arriving)
        body = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", f"{server.url}{CHAT}", json=body) as answer:
            next(answer.iter_lines())
        ended = next(end for event in arriving for step in steps_of(event) for end in step["ended"])
    assert ended[1] == "abort"


def test_nothing_is_recorded_when_nobody_watches(server: LiveServer) -> None:
    wait_until(lambda: not is_watched(server), "the streams of other tests have ended")
    with server.http.stream("GET", f"{server.url}/live/steps") as stream:
        arriving = events(stream)  # held, since the connection closes with it
        next(arriving)
        assert is_watched(server)
        with server.http.stream("GET", f"{server.url}/live/steps") as other:
            next(events(other))
        assert is_watched(server)
    wait_until(lambda: not is_watched(server), "recording has ended")


def test_the_number_of_streams_is_bounded(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: not is_watched(server), "the streams of other tests have ended")
    monkeypatch.setattr(live_view, "MAX_WATCHERS", 1)
    with server.http.stream("GET", f"{server.url}/live/steps") as stream:
        arriving = events(stream)
        next(arriving)
        with server.http.stream("GET", f"{server.url}/live/steps") as refused:
            assert refused.status_code == 429
            assert json.loads(refused.read())["error"]["code"] == "too_many_watchers"
    wait_until(lambda: not is_watched(server), "the first one has left")
    assert server.status("GET", "/live/steps") == 200


def test_a_stream_that_falls_behind_begins_anew(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "STEPS_KEPT", 5)
    monkeypatch.setattr(live_view, "PERIOD_SECONDS", 0.5)
    pages: dict[int, list[Any]] = {}
    with run_server(model_folder) as live, live.http.stream("GET", f"{live.url}/live/steps") as stream:
        arriving = events(stream)
        apply(pages, next(arriving))
        live.post(CHAT, {"messages": MESSAGES, "max_tokens": 100, "ignore_eos": True})
        for event in arriving:
            apply(pages, event)
            if event["type"] == "snapshot":
                break
        assert event["snapshot"]["number"] >= 5
        assert sum(use[1] == "cached" for use in pages.values()) == live.loaded.engine.stats.num_cached_pages


def test_a_head_request_has_no_stream(server: LiveServer) -> None:
    assert server.http.head(f"{server.url}/live/steps").status_code == 200


def test_a_stopping_server_ends_the_stream(model_folder: Path) -> None:
    with run_server(model_folder) as live, live.http.stream("GET", f"{live.url}/live/steps") as stream:
        arriving = events(stream)
        next(arriving)
        live.worker.draining = True
        assert list(arriving) == []


def test_the_view_can_be_turned_off(model_folder: Path) -> None:
    with run_server(model_folder, live_view=False) as live:
        for path in ("/", "/static/main.js", "/live/steps"):
            assert live.get(path).status_code == 404
