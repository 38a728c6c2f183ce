"""Beam search over sequences that share pages: which beams go on, which are finished, and when to stop.

In every step each live beam offers its most likely next tokens; the best continuations of all beams together become the
next beams. A beam that is continued twice is forked, so that both share the pages written until then. The rules, and
what `length_penalty` and `early_stopping` mean, are those of transformers' beam search, so that results agree.
Knows tokens and scores only; the engine forks and drops the sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from cupyllm.errors import RequestError
from cupyllm.sequence import Sequence

MAX_BEAM_WIDTH = 6


@dataclass(frozen=True)
class BeamParams:
    """What a beam search asks for. Raises RequestError naming the field.

    beam_width      beams that live at the same time, and answers in the end
    length_penalty  a finished beam's score is its log-probability over its length to this power
    early_stopping  True stops when `beam_width` beams have finished; False when a live one, at its present length,
                    cannot become better than the worst of them; "never" when it cannot at any length
    max_tokens      at most this many output tokens; None is all that fits
    """

    beam_width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.beam_width, int) and not isinstance(self.beam_width, bool)
        if not whole or not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise RequestError(f"beam_width must be a whole number from 1 to {MAX_BEAM_WIDTH}", param="beam_width")
        if not _is_number(self.length_penalty) or abs(self.length_penalty) > 10:
            raise RequestError("length_penalty must be a number from -10 to 10", param="length_penalty")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError('early_stopping must be true, false or "never"', param="early_stopping")
        if self.max_tokens == 0:
            raise RequestError("max_tokens must be 1 or more for a beam search", param="max_tokens")


@dataclass(frozen=True)
class FinishedBeam:
    """An answer: its output tokens, its score after the length penalty, and whether an end token ended it."""

    token_ids: tuple[int, ...]
    score: float
    ended: bool


@dataclass(frozen=True)
class Continuation:
    """A beam of the next step: `parent` with one more token, and the log-probability of all its output."""

    parent: Sequence
    token_id: int
    logprob: float


@dataclass(eq=False)
class BeamSearch:
    """One request's beams. `live` holds a sequence for each beam, with the log-probability of its output so far."""

    params: BeamParams
    end_token_ids: frozenset[int]
    max_tokens: int
    num_prompt_tokens: int
    live: dict[int, tuple[Sequence, float]] = field(default_factory=dict)  # by sequence id, best first
    finished: list[FinishedBeam] = field(default_factory=list)  # best first, at most beam_width
    done: bool = False
    failed: bool = False
    _offers: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    _can_improve: bool = True

    @property
    def num_offers(self) -> int:
        """How many next tokens each beam must offer: enough to go on when the best of them are end tokens."""
        return max(2, 1 + len(self.end_token_ids)) * self.params.beam_width

    def offer(self, sequence: Sequence, tokens: list[tuple[int, float]]) -> None:
        """The most likely next tokens of a live beam, (id, logprob), most likely first."""
        self._offers[sequence.id] = tokens

    def has_offer(self, sequence: Sequence) -> bool:
        return sequence.id in self._offers

    @property
    def is_complete(self) -> bool:
        """Whether every live beam has made its offer."""
        return all(sequence_id in self._offers for sequence_id in self.live)

    def advance(self) -> list[Continuation]:
        """Choose the beams of the next step, best first; none when the search is done."""
        width = self.params.beam_width
        candidates = [
            Continuation(sequence, token_id, logprob + token_logprob)
            for sequence, logprob in self.live.values()
            for token_id, token_logprob in self._offers[sequence.id]
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)
        candidates = candidates[: self.num_offers]
        self._offers.clear()
        length = len(candidates[0].parent.token_ids) + 1 - self.num_prompt_tokens
        at_limit = length >= self.max_tokens
        full = len(self.finished) == width and self.params.early_stopping is True
        if self._can_improve and not full:
            ending = [c for c in candidates[:width] if at_limit or c.token_id in self.end_token_ids]
            self._finish(ending, length)
        going_on = [c for c in candidates if not at_limit and c.token_id not in self.end_token_ids][:width]
        self.done = not going_on or self._is_settled(going_on[0].logprob, length)
        return [] if self.done else going_on

    def _finish(self, candidates: list[Continuation], length: int) -> None:
        for candidate in candidates:
            output = candidate.parent.token_ids[self.num_prompt_tokens :]
            score = candidate.logprob / length**self.params.length_penalty
            ended = candidate.token_id in self.end_token_ids
            self.finished.append(FinishedBeam((*output, candidate.token_id), score, ended))
        self.finished.sort(key=lambda beam: -beam.score)  # stable: of equal scores the earlier stays before
        del self.finished[self.params.beam_width :]

    def _is_settled(self, best_live: float, length: int) -> bool:
        """Whether enough beams have finished and, by the rule asked for, no live one may become better."""
        if len(self.finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        reach = self.max_tokens if longest else length
        self._can_improve &= best_live / reach**self.params.length_penalty > self.finished[-1].score
        return not self._can_improve


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
