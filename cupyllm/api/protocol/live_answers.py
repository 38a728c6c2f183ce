"""The events of /live/steps, as types."""

from __future__ import annotations

from typing import Literal

from cupyllm.api.protocol.answers import Answer
from cupyllm.step_trace import Snapshot, StepRecord


class Limits(Answer):
    """The server's limits that the page shows beside what is used of them."""

    max_decode_batch_size: int
    max_step_tokens: int
    max_waiting: int
    max_model_len: int


class LiveSnapshot(Answer):
    """Where the engine stands when a stream begins, and again when it had fallen behind."""

    type: Literal["snapshot"]
    snapshot: Snapshot
    limits: Limits


class LiveSteps(Answer):
    """What the engine did since the event before."""

    type: Literal["steps"]
    steps: list[StepRecord]


LiveEvent = LiveSnapshot | LiveSteps
