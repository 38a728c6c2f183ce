"""What a step of the engine gives back: tokens, as an iterable of events, and what has ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cupyllm.beam_search import BeamSearch
from cupyllm.sampling_batch import SampleResult, TokenLogprobs, row_logprobs
from cupyllm.sequence import FinishReason, Sequence

# In the place of a token for a sequence that had ended when it was read.
PASSED_OVER = -2


@dataclass(frozen=True)
class TokenEvent:
    """What a step gave one sequence: a token, and the reason if that was its last.

    There is no token where the sequence failed, and where it only read its prompt (max_tokens 0).
    """

    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class SampledTokens:
    """One token for each of `sequences`, -1 for one that failed, PASSED_OVER for one that had ended before.

    Why a sequence ended is noted by row, since it may have ended with another token of the same result.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    ended: dict[int, FinishReason]
    sampled: SampleResult
    beams: frozenset[int]  # ids of the sequences that belong to a search

    def __iter__(self) -> Iterator[TokenEvent]:
        for row, (sequence, token_id) in enumerate(zip(self.sequences, self.token_ids, strict=True)):
            if sequence.id in self.beams or token_id == PASSED_OVER:
                continue
            reason = self.ended.get(row)
            if reason is FinishReason.ERROR:
                yield TokenEvent(sequence, None, None, reason)
            else:
                yield TokenEvent(sequence, token_id, self._logprobs(sequence, row), reason)

    def _logprobs(self, sequence: Sequence, row: int) -> TokenLogprobs | None:
        count = sequence.params.logprobs
        return None if count is None else row_logprobs(self.sampled, row, count)


@dataclass(frozen=True)
class StepResult:
    """What a step gave: tokens, searches that have ended, and prompts that were only to be read and now are.

    Iterating gives TokenEvents; the tokens of beams are only known when their search has ended.
    """

    tokens: tuple[SampledTokens, ...] = ()
    ended_searches: list[BeamSearch] = field(default_factory=list)
    ended_prompts: list[Sequence] = field(default_factory=list)

    def __add__(self, other: StepResult) -> StepResult:
        return StepResult(
            self.tokens + other.tokens,
            self.ended_searches + other.ended_searches,
            self.ended_prompts + other.ended_prompts,
        )

    def __iter__(self) -> Iterator[TokenEvent]:
        for sequence in self.ended_prompts:
            yield TokenEvent(sequence, None, None, sequence.finish_reason)
        for tokens in self.tokens:
            yield from tokens
