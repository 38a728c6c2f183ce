"""What GET /metrics shows: prometheus-client's format, names as vLLM has them with `cupyllm:` in front.

What the engine counts is read from it when somebody asks. What requests went through is counted where it happens:
request_log.py tells of starts, tokens and ends, middleware.py and connection.py of refusals. Labels have few values.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cupyllm.api.tally import Tally
from cupyllm.api.worker import EngineWorker
from cupyllm.sequence import FinishReason

PREFIX = "cupyllm:"
# Seconds: from a token on a large GPU to a long answer on a slow CPU.
TOKEN_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REQUEST_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
LENGTH_BOUNDS = tuple(float(4**power) for power in range(10))

REFUSALS = {
    400: "invalid_request",
    401: "no_api_key",
    403: "host_not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
    429: "queue_full",
    500: "internal_error",
    503: "unavailable",
}
OTHER_REFUSAL = "other"


class Metrics:
    """The metrics of one server. But for `text`, all is called on the event loop."""

    def __init__(self, worker: EngineWorker, model_name: str) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_EngineFigures(self, worker, model_name))
        self.num_output_tokens = 0
        self.inter_token_seconds = Tally(TOKEN_BOUNDS)

        def counter(name: str, meaning: str, **labels: tuple[str, ...]) -> Counter:
            made = Counter(PREFIX + name, meaning, ["model_name", *labels], registry=registry)
            for label, values in labels.items():  # so that a reason that has not occurred yet shows as 0
                for value in values:
                    made.labels(model_name=model_name, **{label: value})
            return made

        def histogram(name: str, meaning: str, bounds: tuple[float, ...] = REQUEST_BOUNDS) -> Histogram:
            made = Histogram(PREFIX + name, meaning, ["model_name"], registry=registry, buckets=bounds)
            return made.labels(model_name=model_name)

        self._model_name = model_name
        self.started = counter("request_started", "Requests that the engine took.").labels(model_name)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that the engine took.").labels(
            model_name
        )
        self._finished = counter(
            "request_success",
            "Requests that ended, by reason; abort and error are those that did not succeed.",
            finished_reason=tuple(reason.value for reason in FinishReason),
        )
        self._refused = counter(
            "request_refused",
            "Requests that were answered with an error before the engine took them, by reason.",
            reason=(*REFUSALS.values(), OTHER_REFUSAL),
        )
        self.first_token_seconds = histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token."
        )
        self.total_seconds = histogram("e2e_request_latency_seconds", "From the arrival of a request to its end.")
        self.queue_seconds = histogram(
            "request_queue_time_seconds", "From the arrival of a request until its prompt began to run."
        )
        self.prefill_seconds = histogram(
            "request_prefill_time_seconds", "From when its prompt began to run to the first token."
        )
        self.decode_seconds = histogram("request_decode_time_seconds", "From the first token to the last.")
        self.seconds_per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time from token to token of a request.", TOKEN_BOUNDS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BOUNDS)
        self.output_length = histogram("request_generation_tokens", "Output tokens of a request.", LENGTH_BOUNDS)

    def finish(self, reason: FinishReason) -> None:
        """A request has ended that had been started."""
        self._finished.labels(self._model_name, reason.value).inc()

    def refuse(self, status: int) -> None:
        """A request was answered with an error that had not been started."""
        self._refused.labels(self._model_name, REFUSALS.get(status, OTHER_REFUSAL)).inc()

    def text(self) -> bytes:
        """All metrics in the text format 0.0.4, which every scraper reads.

        As OpenMetrics 1.0 prometheus-client (0.26) would write "_" for the ":" of the names in samples, not in heads.
        """
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """What the engine and its thread count, and what is counted for every token."""

    def __init__(self, metrics: Metrics, worker: EngineWorker, model_name: str) -> None:
        self._metrics = metrics
        self._worker = worker
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._worker.stats
        pages = {"live": stats.num_live_pages, "cached": stats.num_cached_pages, "free": stats.num_free_pages}
        yield self._gauge("num_requests_running", "Sequences that have a row or a prompt in work.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Live pages over all pages, 0 to 1.",
            stats.num_live_pages / sum(pages.values()),
        )
        by_state = GaugeMetricFamily(PREFIX + "kv_cache_pages", "Pages, by state.", labels=["model_name", "state"])
        for state, count in pages.items():
            by_state.add_metric([self._model_name, state], count)
        yield by_state
        yield self._counter("num_preemptions", "Times that a sequence lost its pages to others.", stats.num_preemptions)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found there.", stats.num_prefix_hits)
        yield self._counter("generation_tokens", "Output tokens.", self._metrics.num_output_tokens)
        yield self._counter(
            "engine_graph_replays", "Decode steps that were replayed with one call.", stats.num_graph_replays
        )
        yield self._counter("engine_failed_steps", "Steps of the engine that failed.", self._worker.num_failed_steps)
        yield self._histogram(
            "inter_token_latency_seconds", "From one token of an answer to the next.", self._metrics.inter_token_seconds
        )
        yield self._histogram("engine_step_time_seconds", "What a step of the engine took.", self._worker.step_seconds)

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, meaning, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, meaning, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _histogram(self, name: str, meaning: str, tally: Tally) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, meaning, labels=["model_name"])
        family.add_metric([self._model_name], tally.buckets(), tally.sum)
        return family
