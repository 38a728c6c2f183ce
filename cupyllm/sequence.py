"""One stream of tokens being generated, and where it stands. Plain Python: no arrays, no text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from operator import attrgetter

from cupyllm.errors import DeadEndError
from cupyllm.prefix_cache import CachedPage
from cupyllm.prompt_readout import PromptReadout
from cupyllm.sampling import SamplingParams
from cupyllm.token_guide import TokenGuide

# Stands in `token_ids` for a token that has been sampled on the device and not been read yet.
PENDING = -1


class FinishReason(str, enum.Enum):
    """Why a sequence ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"  # an end token or a stop token
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the caller asked
    ERROR = "error"  # no token could be chosen: its logits held no finite value, or it came to a dead end


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens generated after it.

    `token_ids` holds both. Tokens [0, num_computed) have their keys and values in the cache; the rest are still to be
    run. One uncomputed output token is a decode row; more are a prompt (or, after preemption, a recompute) to be
    worked on in chunks.
    """

    id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_tokens: int
    end_token_ids: frozenset[int]
    priority: int = 0  # lower runs first
    arrival: int | None = None  # the id of the sequence it was forked from, if it was; it ranks beside that
    cache_salt: str = ""  # only sequences with the same salt share cached pages
    guide: TokenGuide | None = None  # what may come next, where that is restricted
    is_beam: bool = False  # a beam search chooses its tokens, not the sampling
    readout: PromptReadout | None = None  # what is wanted of the prompt itself; then every prompt token is computed
    page_table: list[int] = field(default_factory=list)
    cached_pages: list[CachedPage] = field(default_factory=list)  # its full pages, as the prefix cache knows them
    num_computed: int = 0
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None before it is admitted
    num_preemptions: int = 0
    row: int | None = None  # its place in the decode batch, while it has one
    queued_at: float | None = None  # seconds of time.monotonic: the engine was asked for it
    started_at: float | None = None  # seconds of time.monotonic: its prompt began to run
    finish_reason: FinishReason | None = None
    dead_end: DeadEndError | None = None  # why no token could be chosen, where the request left none
    most_tokens: int = field(init=False)  # prompt and output, when max_tokens is reached
    rank: tuple[int, int, int] = field(init=False)  # who goes first: lower priority, then earlier arrival (ids grow)
    _distinct_ids: set[int] = field(default_factory=set)
    _num_pending: int = 0
    _num_distinct_of: int = 0
    _output_counts: dict[int, int] = field(default_factory=dict)
    _num_counted: int = 0  # output tokens in _output_counts

    def __post_init__(self) -> None:
        self.most_tokens = self.num_prompt_tokens + self.max_tokens
        self.rank = self.priority, self.id if self.arrival is None else self.arrival, self.id

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
    def num_pending(self) -> int:
        """Tokens at the end that are being sampled."""
        return self._num_pending

    @property
    def is_decoding(self) -> bool:
        """One token is left to run and it is an output token: a row of the decode batch."""
        return self.num_uncomputed == 1 and self.num_output_tokens > 0

    @property
    def distinct_ids(self) -> set[int]:
        """The ids of prompt and output, each once: what the repetition penalty looks at."""
        self._distinct_ids.update(self.token_ids[self._num_distinct_of :])
        self._num_distinct_of = len(self.token_ids)
        return self._distinct_ids

    @property
    def output_counts(self) -> dict[int, int]:
        """How often each id is in the output: what presence and frequency penalty look at."""
        counts = self._output_counts
        for token_id in self.token_ids[self.num_prompt_tokens + self._num_counted :]:
            counts[token_id] = counts.get(token_id, 0) + 1
        self._num_counted = self.num_output_tokens
        return counts

    def expect_token(self) -> None:
        """A token is being sampled, before which everything has been computed; `append` will say which."""
        assert self.page_table, "a fork that found no row is told its token at once"
        self.num_computed = len(self.token_ids)
        self.token_ids.append(PENDING)
        self._num_pending += 1

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token, before which everything has been computed, or say what one is that was expected; returns
        the reason if it was the last. What is expected behind the last one is dropped.
        """
        place = len(self.token_ids) - self._num_pending
        if self._num_pending:
            self.token_ids[place] = token_id
            self._num_pending -= 1
        else:
            if self.page_table:  # a fork that found no row has no pages, and computes everything again
                self.num_computed = place
            self.token_ids.append(token_id)
        if token_id in self.end_token_ids:
            self.finish_reason = FinishReason.STOP
            del self.token_ids[place + 1 :]
        elif place + 1 >= self.most_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason


by_rank = attrgetter("rank")  # a key to sort sequences with
