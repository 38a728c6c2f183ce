"""Writes what an engine does into a file while it does it, for Perfetto: the config key `trace`.

A row of steps, counters of pages and sequences, and a row for each sequence with its time in the queue, in prefill and
in decode. A crash may come at any time, so the file is a complete JSON array after every step.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupyllm.chrome_trace import Event, heading, row_name, span_begin, span_end, step_events, work_of
from cupyllm.errors import ConfigError
from cupyllm.step_trace import SequenceFacts, StepRecord

log = logging.getLogger(__name__)

_END = b"\n]\n"


class JsonArrayFile:
    """A JSON array in a file, one value a line; complete after every `append`, which raises OSError where it fails.

    Appending writes over the end of the array with what is new and the end.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb", buffering=0)
            self._file.write(b"[" + _END)
        except OSError as error:
            raise ConfigError(f"the trace {path} cannot be written: {error.strerror}") from None
        self._size = 1  # without the end
        self._lead = b"\n"

    def append(self, values: list[Any]) -> None:
        """Write the values behind those that are there."""
        data = self._lead + ",\n".join(map(json.dumps, values)).encode()
        self._file.seek(self._size)
        self._file.write(data + _END)
        self._size += len(data)
        self._lead = b",\n"

    def close(self) -> None:
        self._file.close()


@dataclass
class _Row:
    """A sequence: which state it is in, and what is known of it."""

    state: str
    facts: dict[str, Any]


class TraceWriter:
    """Turns the records of steps into events and writes them; `record` is a listener of a StepTrace."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be written."""
        self._file: JsonArrayFile | None = JsonArrayFile(path)
        self._begin_s = time.monotonic()
        self._rows: dict[int, _Row] = {}
        self._file.append(heading())

    def record(self, step: StepRecord) -> None:
        """Write a step. Where that fails the log says so, and no more is written: serving goes on."""
        events = self._events(step)
        if self._file is None or not events:
            return
        try:
            self._file.append(events)
        except OSError as error:
            log.error("the trace cannot be written and ends here: %s", error.strerror)
            self.close()

    def close(self) -> None:
        """Write no more; the file is complete as it is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _events(self, step: StepRecord) -> list[Event]:
        start = step.start_s - self._begin_s
        end = start + step.seconds
        events: list[Event] = []
        forked = {child for _, child in step.forks}
        for facts in step.started:
            queued = start if facts.queued_at is None else facts.queued_at - self._begin_s
            is_fork = facts.id in forked  # its prompt has been computed as that of another
            events += self._meet(facts, "decode" if is_fork else "queue", end if is_fork else queued)
        for number in step.preempted_ids:
            events += self._enter(number, "queue", start)
        for number, _, _ in step.chunks:
            events += self._enter(number, "prefill", start)
        if step.num_tokens:
            args = {"step": step.number, "preempted": step.preempted_ids, "evicted_pages": len(step.evicted_pages)}
            pages = (step.num_live_pages, step.num_cached_pages, step.num_free_pages)
            work = work_of(step.decode_ids, step.chunks, "sequence")
            events += step_events(start, end, work, args, pages=pages, num_waiting=step.num_waiting)
        for number in step.token_ids:
            events += self._enter(number, "decode", end)
        for number, reason in step.ended:
            row = self._rows.pop(number, None)
            if row is not None:
                events.append(span_end(number, row.state, end) | {"args": {"finish": reason}})
        return events

    def _meet(self, sequence: SequenceFacts, state: str, since: float) -> list[Event]:
        """A row for a sequence that is seen first."""
        known = {"prompt_tokens": sequence.num_prompt_tokens, "cached_tokens": sequence.num_cached_tokens}
        self._rows[sequence.id] = _Row(state, known)
        return [row_name(sequence.id, f"sequence {sequence.id}"), span_begin(sequence.id, state, since, known)]

    def _enter(self, number: int, state: str, now: float) -> list[Event]:
        row = self._rows.get(number)
        if row is None or row.state == state:
            return []
        events = [span_end(number, row.state, now), span_begin(number, state, now, row.facts)]
        row.state = state
        return events
