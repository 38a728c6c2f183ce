"""A simulation step by step: as a trace for Perfetto (cupyllm/chrome_trace.py has the format), and as JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupyllm.chrome_trace import Event, heading, row_name, span_begin, span_end, step_events, work_of
from cupyllm.simulator.simulation import RequestRecord, Simulation, StepRecord


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """The whole trace: a row of steps, counters of pages and sequences, and a row for every request that was served."""
    events = heading()
    for index, step in enumerate(simulation.steps):
        args = {"step": index, "preempted": step.preempted_ids, "bound": step.cost.bound}
        pages = (step.num_live_pages, step.num_cached_pages, step.num_free_pages)
        events += step_events(step.start_s, step.end_s, _work(step), args, pages=pages, num_waiting=step.num_waiting)
    for record in simulation.requests:
        if not record.refused:
            events += _request_events(record)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def step_lines(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """One object a step: when, what ran, what it cost, who was preempted, and pages as [state, owner, num_pages]."""
    for index, step in enumerate(simulation.steps):
        yield {
            "step": index,
            "start_s": step.start_s,
            "end_s": step.end_s,
            **_work(step),
            "waiting": step.num_waiting,
            "preempted": step.preempted_ids,
            "bytes": step.cost.num_bytes,
            "operations": step.cost.operations,
            "bound": step.cost.bound,
            "pages": step.pages,
        }


def _work(step: StepRecord) -> dict[str, Any]:
    return work_of(step.decode_ids, step.chunks, "request")


def _request_events(record: RequestRecord) -> list[Event]:
    facts = {
        "prompt_tokens": record.request.prompt_tokens,
        "output_tokens": record.request.output_tokens,
        "cached_tokens": record.num_cached_tokens,
        "preemptions": record.num_preemptions,
    }
    events = [row_name(record.id, f"request {record.id}")]
    for span in record.spans:
        events.append(span_begin(record.id, span.state, span.start_s, facts))
        events.append(span_end(record.id, span.state, span.end_s))
    return events
