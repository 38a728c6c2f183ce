"""One stream of tokens being generated, and where it stands. Plain Python: no arrays, no text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from cupyllm.prefix_cache import CachedPage
from cupyllm.sampling import SamplingParams


class FinishReason(str, enum.Enum):
    """Why a sequence ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"  # an end token or a stop token
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the caller asked
    ERROR = "error"  # its logits held no finite value


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens generated after it.

    `token_ids` holds both. Tokens [0, num_computed) have their keys and values in the cache; the rest are still to
    be run. One uncomputed token is a decode row; more are a prompt (or, after preemption, a recompute) to be worked
    on in chunks.
    """

    id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_tokens: int
    end_token_ids: frozenset[int]
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # only sequences with the same salt share cached pages
    distinct_ids: set[int] = field(default_factory=set)  # of prompt and output, for the repetition penalty
    page_table: list[int] = field(default_factory=list)
    cached_pages: list[CachedPage] = field(default_factory=list)  # its full pages, as the prefix cache knows them
    num_computed: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None before it is admitted
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.distinct_ids.update(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """One token is left to run and it is an output token: a row of the decode batch."""
        return self.num_uncomputed == 1 and self.num_output_tokens > 0

    def append(self, token_id: int) -> None:
        """Add a sampled token and settle whether it ends the sequence."""
        assert self.finish_reason is None
        self.token_ids.append(token_id)
        self.distinct_ids.add(token_id)
        if token_id in self.end_token_ids:
            self.finish_reason = FinishReason.STOP
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH


def rank(sequence: Sequence) -> tuple[int, int]:
    """Who goes first: the lower priority, then the earlier arrival (ids grow)."""
    return sequence.priority, sequence.id
