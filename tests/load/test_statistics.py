"""Outcomes in figures, against values worked out by hand and against NumPy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from cupyllm.load.client import Outcome
from cupyllm.load.statistics import Goal, figure_rows, figures, summarise, table_column
from cupyllm.percentiles import percentiles


def outcome(due: float, *text_times: float, sent: float | None = None, tokens: int | None = None) -> Outcome:
    """A request that was due at `due` and whose events came at `text_times`."""
    return Outcome(due, due if sent is None else sent, text_times[-1], list(text_times), 10, tokens)


def failed(due: float, error: str) -> Outcome:
    return Outcome(due, due, due + 1.0, error=error)


@pytest.mark.parametrize("count", [1, 2, 3, 99, 100, 101, 1000])
def test_percentiles_are_those_of_numpy_and_of_the_definition(count: int) -> None:
    values = [random.Random(count).expovariate(1.0) for _ in range(count)]
    found = percentiles(values)
    assert found is not None
    ordered = sorted(values)
    for share, value in ((0.50, found.p50), (0.95, found.p95), (0.99, found.p99)):
        below, part = divmod(share * (count - 1), 1)
        next_one = ordered[min(int(below) + 1, count - 1)]
        assert value == pytest.approx(ordered[int(below)] * (1 - part) + next_one * part, rel=1e-12)
        assert value == pytest.approx(float(np.quantile(values, share)), rel=1e-12)


def test_percentiles_of_nothing_are_none_and_of_nan_are_nan() -> None:
    assert percentiles([]) is None
    assert math.isnan(percentiles([1.0, math.nan]).p50)  # type: ignore[union-attr]


def test_times_count_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    one = outcome(10.0, 13.0, 13.5, 14.0, sent=12.5)
    assert one.time_to_first_token == 3.0
    assert one.end_to_end == 4.0
    summary = summarise([one])
    assert summary.client_lag is not None
    assert summary.client_lag.p50 == 2.5
    assert summary.duration_s == 4.0


def test_time_per_token_is_over_the_servers_count_where_several_tokens_share_an_event() -> None:
    assert outcome(0.0, 1.0, 2.0, 3.0).time_per_output_token == 1.0
    assert outcome(0.0, 1.0, 2.0, 3.0, tokens=5).time_per_output_token == 0.5
    assert outcome(0.0, 1.0).time_per_output_token is None


def test_rates_are_over_the_whole_run_and_count_answers_only() -> None:
    summary = summarise([outcome(0.0, 1.0, 2.0), outcome(1.0, 2.0, 4.0, 8.0), failed(2.0, "status 429: full")])
    assert summary.duration_s == 8.0
    assert summary.requests_per_s == 2 / 8
    assert summary.output_tokens_per_s == 5 / 8
    assert summary.answered == 2
    assert summary.errors == {"status 429: full": 1}
    assert summary.inter_token is not None
    assert summary.inter_token.p50 == 2.0  # of 1, 2 and 4
    assert summary.prompt_tokens == 20


def test_the_last_failure_belongs_to_the_run() -> None:
    late = Outcome(0.0, 0.0, 100.0, error="no answer within 100 s")
    assert summarise([outcome(0.0, 1.0), late]).duration_s == 100.0


@pytest.mark.parametrize(
    ("goal", "good"),
    [
        (Goal(), 2),
        (Goal(time_to_first_token=1.0), 1),
        (Goal(time_to_first_token=0.9), 0),
        (Goal(time_per_output_token=1.0), 1),
        (Goal(end_to_end=3.0), 2),
        (Goal(time_to_first_token=1.0, time_per_output_token=0.5), 0),
    ],
)
def test_goodput_is_of_requests_that_keep_every_limit(goal: Goal, good: int) -> None:
    runs = [outcome(0.0, 1.0, 3.0), outcome(0.0, 2.0, 3.0), failed(3.0, "connection: refused")]
    assert summarise(runs, goal).goodput == good / 4
    assert summarise(runs).goodput is None


def test_a_run_without_any_answer_has_no_times_and_no_rate() -> None:
    summary = summarise([failed(0.0, "status 500: broken")], Goal(end_to_end=1.0))
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.goodput) == (0.0, 0.0, 0.0)
    assert summary.time_to_first_token is summary.end_to_end is None
    assert set(figures(summary)) == {"requests_per_s", "output_tokens_per_s", "errors", "goodput"}
    assert table_column(summary)["  status 500: broken"] == "1"


def test_rows_hold_every_run_and_the_peer_beside_it() -> None:
    own = [summarise([outcome(0.0, 1.0, 2.0)]), summarise([outcome(0.0, 2.0, 4.0)])]
    peer = [summarise([outcome(0.0, 2.0, 4.0)]), summarise([outcome(0.0, 4.0, 8.0)])]
    rows = {row.name: row for row in figure_rows("serve.x", own, "another", peer)}
    row = rows["serve.x.output_tokens_per_s"]
    assert (row.runs, row.peer, row.peer_runs, row.ratio) == ([1.0, 0.5], "another", [0.5, 0.25], 2.0)
    assert rows["serve.x.ttft_ms.p50"].runs == [1000.0, 2000.0]
    assert rows["serve.x.errors"].peer is None


def test_a_figure_that_one_run_lacks_makes_no_row() -> None:
    names = {row.name for row in figure_rows("x", [summarise([outcome(0.0, 1.0)]), summarise([failed(0.0, "e")])])}
    assert "x.ttft_ms.p50" not in names
    assert "x.errors" in names


def test_the_share_of_the_roofline_stands_in_the_table() -> None:
    assert table_column(summarise([outcome(0.0, 1.0, 2.0)]), roofline=4.0)["share of the roofline"] == "25.0%"
