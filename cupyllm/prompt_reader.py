"""Reads what prompts want (prompt_readout.py) out of the hidden states of a step."""

from __future__ import annotations

import numpy as np

from cupyllm.device import Array, Device
from cupyllm.model import Model, final_norm, logits
from cupyllm.ops.reference import ReferenceOps
from cupyllm.plan import PlannedChunk
from cupyllm.prompt_readout import PromptReadout
from cupyllm.sampling_batch import row_logprobs

# Rows of logits that are computed at a time: with Qwen's 151,936 columns they are 39 MB.
_ROWS_AT_A_TIME = 64


class PromptReader:
    """Reads what prompts want out of a step's hidden states."""

    def __init__(self, ops: ReferenceOps, model: Model, device: Device, vocab_limit: int) -> None:
        self._ops = ops
        self._model = model
        self._device = device
        self._vocab_limit = vocab_limit

    def read(self, chunk: PlannedChunk, hidden: Array, first_row: int) -> None:
        """Read a chunk whose tokens' hidden states are the rows from `first_row` on of `hidden`: (T, C)."""
        readout = chunk.sequence.readout
        if readout is None:
            return
        if readout.num_logprobs is not None:
            self._read_logprobs(readout, readout.num_logprobs, chunk, hidden, first_row)
        if readout.pooling is not None:
            self._pool(readout, chunk, hidden, first_row)

    def _read_logprobs(
        self, readout: PromptReadout, count: int, chunk: PlannedChunk, hidden: Array, first_row: int
    ) -> None:
        """The hidden state at place p says how likely token p + 1 was."""
        sequence = chunk.sequence
        end = min(chunk.start + chunk.length + 1, sequence.num_prompt_tokens)
        for first in range(len(readout.logprobs), end, _ROWS_AT_A_TIME):
            last = min(first + _ROWS_AT_A_TIME, end)
            rows = np.arange(first, last, dtype=np.int32) + np.int32(first_row - chunk.start - 1)
            token_ids = np.array(sequence.token_ids[first:last], np.int32)
            scores = logits(self._ops, self._model, hidden, self._device.upload(rows))
            found = self._ops.token_logprobs(
                scores, self._device.upload(token_ids), count, vocab_limit=self._vocab_limit
            )
            found = type(found)(*(self._device.download(array) for array in vars(found).values()))
            readout.logprobs += [row_logprobs(found, row, count) for row in range(last - first)]

    def _pool(self, readout: PromptReadout, chunk: PlannedChunk, hidden: Array, first_row: int) -> None:
        new = chunk.start + chunk.length - readout.num_pooled
        if new <= 0:
            return
        last = first_row + chunk.length
        states = self._ops.rms_norm(hidden[last - new : last], final_norm(self._model))
        readout.pool(self._device.download(states))
