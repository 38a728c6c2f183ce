"""Steps and requests over time, as events that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is Google's Trace Event Format: "X" is a span with its duration, "B" and "E" begin and end one, "C" is a
counter and "M" gives a name to a process or a thread. Times are microseconds. The simulator and the server write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]
_ENGINE, _REQUESTS = 1, 2  # "processes" of the trace: groups of rows
_STEPS = 1  # the engine's only row


def heading() -> list[Event]:
    """The names of the groups of rows; a trace begins with these."""
    return [_name(_ENGINE, None, "engine"), _name(_ENGINE, _STEPS, "steps"), _name(_REQUESTS, None, "requests")]


def step_events(
    start_s: float,
    end_s: float,
    work: dict[str, Any],
    args: dict[str, Any],
    *,
    pages: tuple[int, int, int],
    num_waiting: int,
) -> list[Event]:
    """One step with what ran in it, as `work_of` has it, and counters of pages (live, cached, free) and sequences."""
    rows, chunks = len(work["decode_rows"]), len(work["chunks"])
    name = f"{rows} decodes" + f" + {chunks} chunks" * bool(chunks)
    start = _microseconds(start_s)
    span = {"dur": _microseconds(end_s) - start, "args": args | work}
    counted = dict(zip(("live", "cached", "free"), pages, strict=True))
    sequences = {"in the step": rows + chunks, "waiting": num_waiting}
    return [
        {"ph": "X", "name": name, "pid": _ENGINE, "tid": _STEPS, "ts": start, **span},
        {"ph": "C", "name": "pages", "pid": _ENGINE, "ts": start, "args": counted},
        {"ph": "C", "name": "sequences", "pid": _ENGINE, "ts": start, "args": sequences},
    ]


def work_of(decode_ids: Sequence[int], chunks: Iterable[tuple[int, int, int]], owner: str) -> dict[str, Any]:
    """The decode rows and the prompt chunks of a step; `owner` is what the ids are of, "request" or "sequence"."""
    pieces = [{owner: number, "start": start, "length": length} for number, start, length in chunks]
    return {"decode_rows": list(decode_ids), "chunks": pieces}


def row_name(number: int, name: str) -> Event:
    """What the row of a request, or a sequence, is called."""
    return _name(_REQUESTS, number + 1, name)


def span_begin(number: int, state: str, start_s: float, facts: dict[str, Any]) -> Event:
    """A request enters a state: "queue", "prefill" or "decode"."""
    place = {"pid": _REQUESTS, "tid": number + 1, "ts": _microseconds(start_s)}
    return {"ph": "B", "name": state, **place, "args": facts}


def span_end(number: int, state: str, end_s: float) -> Event:
    """It leaves the state."""
    return {"ph": "E", "name": state, "pid": _REQUESTS, "tid": number + 1, "ts": _microseconds(end_s)}


def _name(process: int, thread: int | None, name: str) -> Event:
    kind = "process_name" if thread is None else "thread_name"
    return {"ph": "M", "name": kind, "pid": process, "tid": thread or 0, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
