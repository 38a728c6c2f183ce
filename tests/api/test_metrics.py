"""GET /metrics agrees with the engine and with what clients got, whenever nothing runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cupyllm.api.metrics import OTHER_REFUSAL, PREFIX, REFUSALS
from cupyllm.sequence import FinishReason
from tests.api.faults import FaultyOps, Turnstile, pass_until, start_stream
from tests.api.live_server import MESSAGES, MODEL_NAME, LiveServer, frames, raw_connection, run_server, wait_until

ROOT = Path(__file__).parents[2]
TEXT = "/v1/completions"
PAGES = "the weather in Paris today and tomorrow " * 4  # longer than a page
ASK = {"prompt": PAGES, "max_tokens": 6, "ignore_eos": True}
Samples = dict[tuple[str, str], float]  # (name without prefix, label that is not the model) -> value


@pytest.fixture
def served(model_folder: Path) -> Iterator[tuple[LiveServer, FaultyOps]]:
    """A server of its own, so that its counters begin at 0."""
    made: list[FaultyOps] = []
    with run_server(model_folder, prepare=lambda loaded: made.append(FaultyOps(loaded)), max_waiting=4) as live:
        yield live, made[0]


def samples(server: LiveServer) -> Samples:
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL_NAME
            assert len(labels) <= 1
            found[sample.name.removeprefix(PREFIX), next(iter(labels.values()), "")] = sample.value
    return found


def when_quiet(server: LiveServer) -> Samples:
    """The metrics once nothing runs, held against the engine."""
    wait_until(lambda: server.worker.num_live == 0 and not server.loaded.engine.has_work, "nothing runs")
    found = samples(server)
    stats = server.loaded.engine.stats
    assert found["num_requests_running", ""] == found["num_requests_waiting", ""] == 0
    pages = [found["kv_cache_pages", state] for state in ("live", "cached", "free")]
    assert pages == [0, stats.num_cached_pages, stats.num_free_pages]
    assert sum(pages) == server.loaded.engine.scheduler.allocator.num_pages
    assert found["kv_cache_usage_perc", ""] == 0
    assert found["num_preemptions_total", ""] == stats.num_preemptions
    ended = sum(finished(found).values())
    assert found["request_started_total", ""] == ended
    assert found["e2e_request_latency_seconds_count", ""] == ended
    assert found["request_prompt_tokens_sum", ""] == found["prompt_tokens_total", ""]
    assert found["request_generation_tokens_sum", ""] == found["generation_tokens_total", ""]
    for name, _ in list(found):
        if name.endswith("_bucket"):
            bounds = {bound: value for (one, bound), value in found.items() if one == name}
            assert list(bounds.values()) == sorted(bounds.values())
            assert bounds["+Inf"] == found[name.removesuffix("_bucket") + "_count", ""]
    return found


def finished(found: Samples) -> dict[str, float]:
    return {reason: value for (name, reason), value in found.items() if name == "request_success_total"}


def refused(found: Samples) -> dict[str, float]:
    """Those reasons that occurred."""
    return {reason: value for (name, reason), value in found.items() if name == "request_refused_total" and value}


def test_every_metric_is_there_from_the_start_and_all_counters_are_zero(served: tuple[LiveServer, FaultyOps]) -> None:
    server, _ = served
    found = when_quiet(server)
    counted = {key: value for key, value in found.items() if key[0].endswith(("_total", "_count", "_sum", "_bucket"))}
    assert set(counted.values()) == {0}
    assert set(finished(found)) == {reason.value for reason in FinishReason}
    reasons = {reason for name, reason in found if name == "request_refused_total"}
    assert reasons == {*REFUSALS.values(), OTHER_REFUSAL}


def test_tokens_and_times_are_those_that_clients_got(served: tuple[LiveServer, FaultyOps]) -> None:
    server, _ = served
    answers = [
        server.post(TEXT, ASK),
        server.post(TEXT, ASK | {"n": 3, "seed": 1}),
        server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True}),
        server.post(TEXT, ASK | {"prompt": ["one", "two"], "max_tokens": 2}),
    ]
    usages = [answer.json()["usage"] for answer in answers]
    streamed = server.post(TEXT, ASK | {"stream": True, "stream_options": {"include_usage": True}})
    usages.append(frames(streamed)[-2]["usage"])
    beams = server.post(TEXT, {"prompt": "the", "max_tokens": 3, "use_beam_search": True, "beam_width": 2}).json()
    vectors = server.post("/v1/embeddings", {"input": ["one", "two three"]}).json()
    found = when_quiet(server)
    tokens = sum(usage["completion_tokens"] for usage in usages)
    assert tokens == 6 + 18 + 5 + 4 + 6
    assert found["generation_tokens_total", ""] == tokens + beams["usage"]["completion_tokens"]
    everything = [*usages, beams["usage"], vectors["usage"]]
    assert found["prompt_tokens_total", ""] == sum(usage["prompt_tokens"] for usage in everything)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert found["prefix_cache_hits_total", ""] == cached > 0
    prompts = sum(usage["prompt_tokens"] for usage in [*usages, beams["usage"]])  # embeddings read nothing from it
    assert found["prefix_cache_queries_total", ""] == prompts
    answers_given = 1 + 3 + 1 + 2 + 1  # those of beams come all at once
    assert found["inter_token_latency_seconds_count", ""] == tokens - answers_given
    assert found["time_to_first_token_seconds_count", ""] == 6
    assert found["request_queue_time_seconds_count", ""] == 7
    assert found["request_prefill_time_seconds_count", ""] == found["request_decode_time_seconds_count", ""] == 6
    assert found["request_time_per_output_token_seconds_count", ""] == 5
    assert found["engine_step_time_seconds_count", ""] >= 7
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    assert sum(found[f"{part}_sum", ""] for part in parts) <= found["e2e_request_latency_seconds_sum", ""]
    assert finished(found) == {"stop": 1, "length": 6, "abort": 0, "error": 0}
    assert refused(found) == {}


def test_running_and_waiting_sequences_show_while_they_do(served: tuple[LiveServer, FaultyOps]) -> None:
    server, ops = served
    with Turnstile(ops) as turnstile, ThreadPoolExecutor(1) as pool:
        stream = start_stream(server, turnstile, pool, ASK | {"max_tokens": 40})
        pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
        found = samples(server)
        assert found["num_requests_running", ""] == found["request_started_total", ""] == 1
        assert found["kv_cache_pages", "live"] >= 1
        assert 0 < found["kv_cache_usage_perc", ""] <= 1
        assert sum(finished(found).values()) == 0
    stream.read()
    assert finished(when_quiet(server))["length"] == 1


def test_a_client_that_leaves_counts_as_an_abort(served: tuple[LiveServer, FaultyOps]) -> None:
    server, ops = served
    with Turnstile(ops) as turnstile, ThreadPoolExecutor(1) as pool:
        start_stream(server, turnstile, pool, ASK | {"max_tokens": 400}).close()
        pass_until(turnstile, lambda: server.worker.num_live == 0)
    found = when_quiet(server)
    assert finished(found) == {"stop": 0, "length": 0, "abort": 1, "error": 0}


def test_a_failed_step_counts_as_an_error_and_not_as_a_refusal(served: tuple[LiveServer, FaultyOps]) -> None:
    server, ops = served

    def fail(number: int) -> None:
        ops.before_step = lambda number: None
        raise RuntimeError("boom")

    ops.before_step = fail
    assert server.post(TEXT, ASK).status_code == 500
    ops.before_step = fail
    assert server.post("/v1/embeddings", {"input": "one"}).status_code == 500
    ops.before_step = fail
    assert "error" in frames(server.post(TEXT, ASK | {"stream": True}))[-1]
    found = when_quiet(server)
    assert finished(found) == {"stop": 0, "length": 0, "abort": 0, "error": 3}
    assert refused(found) == {}
    assert found["engine_failed_steps_total", ""] == 3


def test_logits_that_are_not_finite_count_as_an_error(
    served: tuple[LiveServer, FaultyOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ops = served
    real = ops._ops.logits
    monkeypatch.setattr(ops._ops, "logits", lambda *a, **options: real(*a, **options) * float("nan"))
    assert server.post(TEXT, ASK).status_code == 500
    assert finished(when_quiet(server))["error"] == 1


def test_refusals_are_counted_by_reason(served: tuple[LiveServer, FaultyOps]) -> None:
    server, ops = served
    assert server.post(TEXT, ASK | {"temperature": 9}).status_code == 400
    assert server.post(TEXT, ASK | {"model": "other"}).status_code == 404
    assert server.get("/secret-path").status_code == 404
    assert server.get(TEXT).status_code == 405
    assert server.post(TEXT, ASK, headers={"host": "example.com"}).status_code == 403
    assert server.http.post(server.url + TEXT, content=b"text").status_code == 415
    assert server.post(TEXT, {"prompt": "a" * 9_000_000}).status_code == 413
    with Turnstile(ops) as turnstile, ThreadPoolExecutor(1) as pool:
        stream = start_stream(server, turnstile, pool, ASK | {"max_tokens": 40})
        assert server.post(TEXT, ASK | {"prompt": ["a"] * 5}).status_code == 400  # can never wait
        many: list[Any] = []
        with ThreadPoolExecutor(8) as clients:
            many += [clients.submit(server.post, TEXT, ASK | {"prompt": ["a"] * 4}) for _ in range(3)]
            pass_until(turnstile, lambda: any(one.done() for one in many))
            turnstile.let_pass(1000)
    stream.read()
    statuses = [one.result().status_code for one in many]
    with raw_connection(server) as connection:
        connection.sendall(b"NOT HTTP\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    server.worker.draining = True
    assert server.post(TEXT, ASK).status_code == 503
    assert server.get("/ready").status_code == 503  # a probe, not a request that is refused
    found = when_quiet(server)
    expected = {
        "invalid_request": 3,
        "not_found": 2,
        "method_not_allowed": 1,
        "host_not_allowed": 1,
        "unavailable": 1,
        "queue_full": statuses.count(429),
        "too_large": 1,
        "unsupported_media_type": 1,
    }
    assert refused(found) == {reason: count for reason, count in expected.items() if count}
    assert statuses.count(429) >= 1
    assert "secret-path" not in server.get("/metrics").text


def test_a_scraper_that_prefers_openmetrics_gets_the_names_with_their_colon(server: LiveServer) -> None:
    """What Prometheus 2 sends: prometheus-client would answer with names that have "_" for ":"."""
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
    answer = server.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {sample.name for family in text_string_to_metric_families(answer.text) for sample in family.samples}
    assert "cupyllm:request_started_total" in names
    assert all(name.startswith(PREFIX) for name in names)


def test_metrics_need_the_key(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THIS_TEST", "sk-1")
    with run_server(model_folder, api_key_env="KEY_OF_THIS_TEST") as live:
        assert live.get("/metrics").status_code == 401
        assert live.get("/metrics", headers={"authorization": "Bearer sk-1"}).status_code == 200


def families(server: LiveServer) -> dict[str, str]:
    """Name -> type, without the times at which series were created."""
    found = text_string_to_metric_families(server.get("/metrics").text)
    return {
        family.name + "_total" * (family.type == "counter"): family.type
        for family in found
        if not family.name.endswith("_created")
    }


def test_the_document_has_every_metric_with_its_type(server: LiveServer) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(cupyllm:\w+)(?:\{[^}]*\})?` \| (\w+) \|", text, re.MULTILINE)
    assert dict(rows) == families(server)
    assert len(rows) == len(dict(rows))


def test_the_dashboard_shows_metrics_that_exist(server: LiveServer) -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    known = families(server)
    histograms = [name for name, kind in known.items() if kind == "histogram"]
    series = {name + end for name in histograms for end in ("_bucket", "_sum", "_count")}
    for expression in expressions:
        names = set(re.findall(r"cupyllm:\w+", expression))
        assert names, expression
        assert names <= series | {name for name, kind in known.items() if kind != "histogram"}, expression
    shown = set(re.findall(r"cupyllm:\w+", " ".join(expressions)))
    left_out = {name for name in known if not any(one.startswith(name) for one in shown)}
    assert not left_out, "the dashboard has no panel for these"


def test_a_scrape_while_the_engine_is_in_a_step_waits_for_nothing(served: tuple[LiveServer, FaultyOps]) -> None:
    server, ops = served
    with Turnstile(ops) as turnstile, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, TEXT, ASK)
        wait_until(lambda: turnstile.num_arrived > 0, "a step is under way")
        assert samples(server)["num_requests_running", ""] == 1  # an answer, although the step cannot go on
        turnstile.let_pass(1000)
        assert isinstance(answer.result(), httpx.Response)
