"""A simulation step by step: as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open, and as JSON lines.

The format of the first is Google's Trace Event Format: "X" is a span with its duration, "B" and "E" begin and end one,
"C" is a counter and "M" gives a name to a process or a thread. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupyllm.simulator.simulation import RequestRecord, Simulation, StepRecord

_ENGINE, _REQUESTS = 1, 2  # "processes" of the trace: groups of rows
_STEPS = 1  # the engine's only row


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """The whole trace: a row of steps, counters of pages and sequences, and a row for every request that was served."""
    events = [_name(_ENGINE, None, "engine"), _name(_ENGINE, _STEPS, "steps"), _name(_REQUESTS, None, "requests")]
    for index, step in enumerate(simulation.steps):
        events += _step_events(index, step)
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


def _step_events(index: int, step: StepRecord) -> list[dict[str, Any]]:
    name = f"{len(step.decode_ids)} decodes" + f" + {len(step.chunks)} chunks" * bool(step.chunks)
    start = _microseconds(step.start_s)
    args = {"step": index, **_work(step), "preempted": step.preempted_ids, "bound": step.cost.bound}
    span = {"dur": _microseconds(step.end_s) - start, "args": args}
    pages = {"live": step.num_live_pages, "cached": step.num_cached_pages, "free": step.num_free_pages}
    sequences = {"in the step": step.num_sequences, "waiting": step.num_waiting}
    return [
        {"ph": "X", "name": name, "pid": _ENGINE, "tid": _STEPS, "ts": start, **span},
        {"ph": "C", "name": "pages", "pid": _ENGINE, "ts": start, "args": pages},
        {"ph": "C", "name": "sequences", "pid": _ENGINE, "ts": start, "args": sequences},
    ]


def _work(step: StepRecord) -> dict[str, Any]:
    chunks = [{"request": request, "start": start, "length": length} for request, start, length in step.chunks]
    return {"decode_rows": step.decode_ids, "chunks": chunks}


def _request_events(record: RequestRecord) -> list[dict[str, Any]]:
    row = {"pid": _REQUESTS, "tid": record.id + 1}
    facts = {
        "prompt_tokens": record.request.prompt_tokens,
        "output_tokens": record.request.output_tokens,
        "cached_tokens": record.num_cached_tokens,
        "preemptions": record.num_preemptions,
    }
    events = [_name(_REQUESTS, record.id + 1, f"request {record.id}")]
    for span in record.spans:
        events.append({"ph": "B", "name": span.state, **row, "ts": _microseconds(span.start_s), "args": facts})
        events.append({"ph": "E", "name": span.state, **row, "ts": _microseconds(span.end_s)})
    return events


def _name(process: int, thread: int | None, name: str) -> dict[str, Any]:
    kind = "process_name" if thread is None else "thread_name"
    return {"ph": "M", "name": kind, "pid": process, "tid": thread or 0, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
