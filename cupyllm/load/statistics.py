"""Outcomes in figures: rates, percentiles, goodput, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cupyllm.figures import Row
from cupyllm.load.client import Outcome
from cupyllm.percentiles import Percentiles, milliseconds, percentiles


@dataclass(frozen=True)
class Goal:
    """Seconds within which a request must be served to count for goodput; None does not matter.

    time_to_first_token and end_to_end count from when it was due, time_per_output_token is its mean.
    """

    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    end_to_end: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        if outcome.error is not None:
            return False
        return all(
            most is None or time is None or time <= most
            for most, time in (
                (self.time_to_first_token, outcome.time_to_first_token),
                (self.time_per_output_token, outcome.time_per_output_token),
                (self.end_to_end, outcome.end_to_end),
            )
        )


@dataclass(frozen=True)
class LoadSummary:
    """A run in figures. Times are seconds, of requests that were answered in full; None where there was none to time.

    Rates are over `duration_s`, from when the first request was due to the end of the last. `inter_token` is the time
    between one event with text and the next of the same answer; `client_lag` how late requests left the client.
    """

    answered: int
    errors: dict[str, int]  # what went wrong -> how many requests
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int | None  # of answered requests; None where the server does not count
    output_tokens: int
    time_to_first_token: Percentiles | None
    time_per_output_token: Percentiles | None
    inter_token: Percentiles | None
    end_to_end: Percentiles | None
    client_lag: Percentiles | None
    goodput: float | None  # requests/s that meet the goal; None without one


def summarise(outcomes: Sequence[Outcome], goal: Goal | None = None) -> LoadSummary:
    """The figures of a run of at least one request."""
    answered = [outcome for outcome in outcomes if outcome.error is None]
    duration_s = max(outcome.ended_at for outcome in outcomes) - min(outcome.due_at for outcome in outcomes)
    output_tokens = sum(outcome.num_tokens for outcome in answered)
    prompts = [outcome.prompt_tokens for outcome in answered if outcome.prompt_tokens is not None]
    per_token = [outcome.time_per_output_token for outcome in answered]
    return LoadSummary(
        answered=len(answered),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        duration_s=duration_s,
        requests_per_s=len(answered) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        prompt_tokens=sum(prompts) if len(prompts) == len(answered) else None,
        output_tokens=output_tokens,
        time_to_first_token=percentiles([outcome.time_to_first_token for outcome in answered]),
        time_per_output_token=percentiles([time for time in per_token if time is not None]),
        inter_token=percentiles([b - a for outcome in answered for a, b in pairwise(outcome.text_times)]),
        end_to_end=percentiles([outcome.end_to_end for outcome in answered]),
        client_lag=percentiles([outcome.sent_at - outcome.due_at for outcome in outcomes if outcome.sent_at]),
        goodput=None if goal is None else sum(map(goal.is_met, outcomes)) / duration_s,
    )


def table_column(summary: LoadSummary, roofline: float | None = None) -> dict[str, str]:
    """What a run's column of the table says; `roofline` is in output tokens/s."""
    column = {
        "requests answered": str(summary.answered),
        **{f"  {error}": str(count) for error, count in summary.errors.items()},
        "duration, s": f"{summary.duration_s:.2f}",
        "requests/s": f"{summary.requests_per_s:.3f}",
        "output tokens/s": f"{summary.output_tokens_per_s:.1f}",
        "prompt tokens": "-" if summary.prompt_tokens is None else str(summary.prompt_tokens),
        "output tokens": str(summary.output_tokens),
        "time to first token, ms": milliseconds(summary.time_to_first_token),
        "time per output token, ms": milliseconds(summary.time_per_output_token),
        "between tokens, ms": milliseconds(summary.inter_token),
        "end to end, ms": milliseconds(summary.end_to_end),
        "sent late by, ms": milliseconds(summary.client_lag),
    }
    if summary.goodput is not None:
        column["goodput, requests/s"] = f"{summary.goodput:.3f}"
    if roofline is not None:
        column["share of the roofline"] = f"{summary.output_tokens_per_s / roofline:.1%}"
    return column


def figures(summary: LoadSummary) -> dict[str, tuple[float, str]]:
    """Name -> (value, unit) of every figure of a run, as rows of a record have them."""
    found = {
        "requests_per_s": (summary.requests_per_s, "requests/s"),
        "output_tokens_per_s": (summary.output_tokens_per_s, "tokens/s"),
        "errors": (float(sum(summary.errors.values())), "requests"),
    }
    if summary.goodput is not None:
        found["goodput"] = (summary.goodput, "requests/s")
    for name, times in (
        ("ttft", summary.time_to_first_token),
        ("tpot", summary.time_per_output_token),
        ("inter_token", summary.inter_token),
        ("end_to_end", summary.end_to_end),
    ):
        if times is not None:
            for percentile in ("p50", "p95", "p99"):
                found[f"{name}_ms.{percentile}"] = (1e3 * getattr(times, percentile), "ms")
    return found


def figure_rows(
    name: str, runs: Sequence[LoadSummary], peer: str | None = None, peer_runs: Sequence[LoadSummary] = ()
) -> list[Row]:
    """Runs of the same load as rows `name.FIGURE`, beside runs of a peer where there are some.

    A figure that some run lacks, because nothing was answered, is left out.
    """
    own, theirs = [figures(run) for run in runs], [figures(run) for run in peer_runs]
    rows = []
    for figure, (_, unit) in own[0].items():
        if not all(figure in run for run in (*own, *theirs)):
            continue
        values, against = ([run[figure][0] for run in side] for side in (own, theirs))
        if peer is None or figure == "errors":
            rows.append(Row(f"{name}.{figure}", unit, values))
        else:
            rows.append(Row(f"{name}.{figure}", unit, values, peer, against))
    return rows
