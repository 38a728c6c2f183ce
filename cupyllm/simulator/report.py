"""What a simulation came to: figures, and the table that shows them, one column a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cupyllm.percentiles import Percentiles, milliseconds, percentiles, side_by_side
from cupyllm.simulator.simulation import RequestRecord, Simulation


@dataclass(frozen=True)
class Summary:
    """A run in figures. Times are seconds; a time is None where nothing was there to be timed.

    ttft is from arrival to the first token, inter_token between one token and the next of the same request, queue from
    arrival to the first step that runs any of its tokens. ttft_by_priority has an entry for each priority. Means are
    over steps, that of page use is weighted by their time.
    """

    finished: int
    refused: int
    duration_s: float  # from the first arrival to the last token
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Percentiles | None
    ttft_by_priority: dict[int, Percentiles | None]
    inter_token: Percentiles | None
    inter_token_max_s: float
    end_to_end: Percentiles | None
    queue: Percentiles | None
    page_use_mean: float  # share of all pages that are live
    page_use_max: float
    preemptions: int
    prefix_hit_share: float  # of the prompt tokens of served requests
    steps: int
    memory_bound_share: float  # of the steps
    sequences_per_step: float
    tokens_per_step: float


def summarise(simulation: Simulation) -> Summary:
    """The figures of a finished simulation."""
    served = [record for record in simulation.requests if not record.refused]
    gaps = [gap for record in served for gap in np.diff(record.token_times).tolist()]
    duration_s = simulation.now - min((record.arrival_s for record in simulation.requests), default=0.0)
    steps = simulation.steps
    num_pages = simulation.size.num_pages
    live = [step.num_live_pages / num_pages for step in steps]
    return Summary(
        finished=len(served),
        refused=len(simulation.requests) - len(served),
        duration_s=duration_s,
        requests_per_s=_ratio(len(served), duration_s),
        output_tokens_per_s=_ratio(sum(len(record.token_times) for record in served), duration_s),
        ttft=_ttft(served),
        ttft_by_priority={
            priority: _ttft(record for record in served if record.request.priority == priority)
            for priority in sorted({record.request.priority for record in served})
        },
        inter_token=percentiles(gaps),
        inter_token_max_s=max(gaps, default=0.0),
        end_to_end=percentiles([record.token_times[-1] - record.arrival_s for record in served]),
        queue=percentiles(
            [record.first_run_s - record.arrival_s for record in served if record.first_run_s is not None]
        ),
        page_use_mean=_ratio(
            sum(use * step.cost.seconds for use, step in zip(live, steps, strict=True)),
            sum(step.cost.seconds for step in steps),
        ),
        page_use_max=max(live, default=0.0),
        preemptions=sum(record.num_preemptions for record in served),
        prefix_hit_share=_ratio(
            sum(record.num_cached_tokens for record in served), sum(record.request.prompt_tokens for record in served)
        ),
        steps=len(steps),
        memory_bound_share=_ratio(sum(step.cost.bound == "memory" for step in steps), len(steps)),
        sequences_per_step=_ratio(sum(step.num_sequences for step in steps), len(steps)),
        tokens_per_step=_ratio(sum(step.num_tokens for step in steps), len(steps)),
    )


def rows(summary: Summary) -> list[tuple[str, str]]:
    """(what, value) for every line of the table."""
    by_priority = summary.ttft_by_priority if len(summary.ttft_by_priority) > 1 else {}
    return [
        ("requests finished", str(summary.finished)),
        ("requests refused", str(summary.refused)),
        ("simulated time, s", f"{summary.duration_s:.2f}"),
        ("requests/s", f"{summary.requests_per_s:.3f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:.1f}"),
        ("time to first token, ms", milliseconds(summary.ttft)),
        *((f"  at priority {priority}", milliseconds(times)) for priority, times in by_priority.items()),
        ("between tokens, ms", milliseconds(summary.inter_token)),
        ("  the longest, ms", f"{summary.inter_token_max_s * 1e3:.1f}"),
        ("end to end, ms", milliseconds(summary.end_to_end)),
        ("in the queue, ms", milliseconds(summary.queue)),
        ("pages in use, mean / max", f"{summary.page_use_mean:.1%} / {summary.page_use_max:.1%}"),
        ("preemptions", str(summary.preemptions)),
        ("prompt tokens from cache", f"{summary.prefix_hit_share:.1%}"),
        ("steps", str(summary.steps)),
        ("  bound by memory", f"{summary.memory_bound_share:.1%}"),
        ("sequences a step, mean", f"{summary.sequences_per_step:.2f}"),
        ("tokens a step, mean", f"{summary.tokens_per_step:.2f}"),
    ]


def table(summaries: Sequence[Summary], heads: Sequence[str] = ()) -> str:
    """The rows of all runs side by side, under `heads` where there are some: one for the rows, one for each run."""
    return side_by_side([dict(rows(summary)) for summary in summaries], heads)


def _ttft(records: Iterable[RequestRecord]) -> Percentiles | None:
    return percentiles([record.token_times[0] - record.arrival_s for record in records])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
