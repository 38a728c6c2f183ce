"""What a step sampled, before the host has read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.device import Array, Device
from cupyllm.sampling_batch import SampleResult, TopLogprobs
from cupyllm.sequence import Sequence

NO_LOGPROBS = TopLogprobs(np.empty(0, np.float32), np.empty((0, 0), np.int32), np.empty((0, 0), np.float32))


class Sampled:
    """Tokens on the device, where they stay until the next step, and on their way to the host."""

    def __init__(self, token_ids: Array, device: Device, tops: TopLogprobs | None = None) -> None:
        """token_ids is (R,) int32; `tops` are their log-probabilities, where any were asked for."""
        self.token_ids = token_ids
        self._tokens = device.fetch(token_ids)
        wanted = () if tops is None else (tops.logprobs, tops.top_ids, tops.top_logprobs)
        self._tops = [device.fetch(array) for array in wanted]

    def read(self) -> SampleResult:
        """The arrays on the host; waits for them."""
        tops = TopLogprobs(*(fetch() for fetch in self._tops)) if self._tops else NO_LOGPROBS
        return SampleResult(token_ids=self._tokens(), **vars(tops))


@dataclass(frozen=True)
class Unread:
    """Tokens that have been sampled and not yet been read by the host: one for each sequence, in order."""

    sequences: list[Sequence]
    sampled: Sampled | None  # None where there are no sequences
