"""The events of /live/steps, as types."""

from __future__ import annotations

from typing import Annotated, Literal, get_type_hints

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

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


_STEP_FIELDS = {name: NotRequired[kind] for name, kind in get_type_hints(StepRecord).items()}
StepChange = TypedDict("StepChange", _STEP_FIELDS)  # type: ignore[misc]
StepChange.__doc__ = "A step; what is left out is as in the step before it."


class LiveSteps(Answer):
    """What the engine did since the event before. The first step is whole."""

    type: Literal["steps"]
    steps: Annotated[list[StepChange], Field(min_length=1)]


LiveEvent = LiveSnapshot | LiveSteps
