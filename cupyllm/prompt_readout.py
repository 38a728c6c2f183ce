"""What a request wants to know of its prompt itself: the log-probabilities of its tokens, or an embedding of it.

Both need what the model makes of every prompt token, so such a prompt takes nothing over from the prefix cache. They
are read chunk by chunk as the prompt is computed; after a preemption what was read already is not read again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cupyllm.sampling_batch import TokenLogprobs

Pooling = Literal["last", "mean"]


@dataclass
class PromptReadout:
    """What is wanted of a prompt, and what has been read so far.

    num_logprobs  None, or how many of the most likely tokens to report beside each prompt token
    pooling       None, or how the last hidden states become one vector: that of the last token, or their mean
    logprobs      by place in the prompt; the first token has none, since nothing comes before it
    """

    num_logprobs: int | None = None
    pooling: Pooling | None = None
    logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    num_pooled: int = 0
    _sum: np.ndarray | None = None  # (C,) float64, of the hidden states read so far, or the last of them

    @property
    def embedding(self) -> np.ndarray:
        """The pooled hidden state, after the model's last norm: (C,) float32."""
        assert self._sum is not None, "the prompt has not been read"
        return (self._sum / (self.num_pooled if self.pooling == "mean" else 1)).astype(np.float32)

    def pool(self, states: np.ndarray) -> None:
        """Add the hidden states of the next prompt tokens: (tokens, C) float32."""
        self.num_pooled += len(states)
        if self.pooling == "last":
            self._sum = states[-1].astype(np.float64)
        else:
            total = states.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
