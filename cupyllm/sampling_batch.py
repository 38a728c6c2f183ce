"""The sampling parameters of a step's rows as arrays: what the sampling op reads.

Order of work in the op: repetition penalty, offsets, mask, temperature, top-k, top-p, min-p, then one draw. That is the
order of Hugging Face's transformers, whose logits processors come before its warpers. Presence and frequency penalty,
logit_bias, bad words and min_tokens all add something to the logits of a few ids, so they are one list of offsets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cupyllm.errors import DeadEndError
from cupyllm.sampling import SamplingParams
from cupyllm.token_guide import TokenGuide

log = logging.getLogger(__name__)

# Below this a division by the temperature could overflow; the result would be greedy anyway.
GREEDY_BELOW = 1e-4


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of R rows of logits, as arrays.

    Penalised ids and offsets are ragged: row r owns penalty_ids[penalty_starts[r]:penalty_starts[r + 1]], each id once,
    and the like of offset_ids and offsets.
    """

    temperature: np.ndarray  # (R,) float32; 0 is greedy
    top_k: np.ndarray  # (R,) int32; 0 is off
    top_p: np.ndarray  # (R,) float32; 1 is off
    min_p: np.ndarray  # (R,) float32; 0 is off
    repetition_penalty: np.ndarray  # (R,) float32; 1 is off
    penalty_starts: np.ndarray  # (R + 1,) int32
    penalty_ids: np.ndarray  # (M,) int32
    offset_starts: np.ndarray  # (R + 1,) int32
    offset_ids: np.ndarray  # (O,) int32
    offsets: np.ndarray  # (O,) float32, added to the logits; -infinity for what may not be chosen
    mask_rows: np.ndarray  # (R,) int32: the row's place in masks, -1 for one that may choose anything
    masks: np.ndarray  # (G, ceil(vocab_limit / 32)) uint32: bit id % 32 of word id // 32 is set for what may be chosen
    seeds: np.ndarray  # (R,) uint64
    positions: np.ndarray  # (R,) int32, the token's place in its sequence: the counter of the random numbers
    num_logprobs: int  # top tokens wanted by the row that wants most; -1 when none wants logprobs
    vocab_limit: int  # ids from here on have no token and are never chosen

    @property
    def changes_logits(self) -> bool:
        """Whether any row has a penalty, an offset or a mask."""
        return len(self.penalty_ids) + len(self.offset_ids) + len(self.masks) > 0


class SampledSequence(Protocol):
    """What sampling needs to know of a sequence (sequence.py)."""

    token_ids: list[int]
    num_prompt_tokens: int
    end_token_ids: frozenset[int]
    params: SamplingParams
    seed: int
    guide: TokenGuide | None

    @property
    def distinct_ids(self) -> set[int]:
        """The ids of prompt and output."""

    @property
    def output_counts(self) -> dict[int, int]:
        """How often each id is in the output."""


@dataclass(frozen=True)
class TopLogprobs:
    """Log-probabilities of R rows by the model's own distribution. The arrays are empty when none were asked for."""

    logprobs: np.ndarray  # (R,) float32, of the chosen token
    top_ids: np.ndarray  # (R, num_logprobs) int32, most likely first
    top_logprobs: np.ndarray  # (R, num_logprobs) float32


@dataclass(frozen=True)
class SampleResult(TopLogprobs):
    """What the sampling op answers for R rows."""

    token_ids: np.ndarray  # (R,) int32; -1 where a row held NaN or nothing finite


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token and of the most likely ones in its place, (id, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class SamplingBatchBuilder:
    """Lays the sampling parameters of sequences out as arrays; kept while the same sequences are sampled."""

    def __init__(self, vocab_limit: int) -> None:
        self._vocab_limit = vocab_limit
        self.changes_by_step = False  # whether some row built last needs to know its tokens: penalties, guides, ...
        self._sequences: list[Any] = []
        self._kept: SamplingBatch | None = None

    def forget(self) -> None:
        """Sequences got tokens that were sampled in another way."""
        self._kept, self.changes_by_step = None, False

    def build(self, sequences: list[Any]) -> SamplingBatch:
        """The arrays for the sequences (SampledSequence) whose next token is wanted, one row each."""
        if self._kept is not None and sequences == self._sequences:
            # Every one of them got a token since: only the counter of the random numbers has moved on.
            self._kept = replace(self._kept, positions=self._kept.positions + np.int32(1))
            return self._kept
        batch = build_sampling_batch(sequences, vocab_limit=self._vocab_limit)
        self._sequences = sequences
        may_change = any(sequence.params.changes_logits for sequence in sequences)
        self.changes_by_step = batch.changes_logits or may_change
        self._kept = None if self.changes_by_step else batch
        return batch


def build_sampling_batch(sequences: Sequence[SampledSequence], *, vocab_limit: int) -> SamplingBatch:
    """The sampling parameters of the sequences whose next token is wanted, as arrays."""
    params = [sequence.params for sequence in sequences]
    masks = [_mask(sequence, vocab_limit) for sequence in sequences]
    penalised = [
        list(sequence.distinct_ids) if sequence.params.repetition_penalty != 1.0 else [] for sequence in sequences
    ]
    offsets = [
        _offsets(sequence, guided=mask is not None) if sequence.params.changes_logits else {}
        for sequence, mask in zip(sequences, masks, strict=True)
    ]
    given = [mask for mask in masks if mask is not None]
    wanted = [p.logprobs for p in params if p.logprobs is not None]
    return SamplingBatch(
        **fixed_parameters(params),
        penalty_starts=_starts(penalised),
        penalty_ids=np.array([token_id for ids in penalised for token_id in ids], np.int32),
        offset_starts=_starts(offsets),
        offset_ids=np.array([token_id for row in offsets for token_id in row], np.int32),
        offsets=np.array([offset for row in offsets for offset in row.values()], np.float32),
        mask_rows=_places(masks),
        masks=np.stack(given) if given else np.empty((0, _num_words(vocab_limit)), np.uint32),
        seeds=np.array([sequence.seed for sequence in sequences], np.uint64),
        positions=np.array([len(sequence.token_ids) for sequence in sequences], np.int32),
        num_logprobs=max(wanted, default=-1),
        vocab_limit=vocab_limit,
    )


def find_dead_end(sequence: SampledSequence, vocab_limit: int) -> DeadEndError | None:
    """Why a sequence's request leaves no token to come next; None where it leaves one, and where its guide fails."""
    words = np.zeros(_num_words(vocab_limit), np.uint32)
    try:
        guided = sequence.guide is not None and sequence.guide.allow(words)
    except DeadEndError as error:
        return error
    except Exception:
        return None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_limit]
    allowed = set(np.flatnonzero(bits).tolist() if guided else range(vocab_limit))
    forbidden = {i for i, offset in _offsets(sequence, guided=guided).items() if offset == -math.inf}
    if not allowed or allowed - forbidden:
        return None
    return DeadEndError(
        "bad_words forbids every token that could come next; leave some of them out, or allow more tokens",
        param="bad_words",
    )


def fixed_parameters(params: Sequence[SamplingParams]) -> dict[str, np.ndarray]:
    """The parameters of rows that are the same for every token, as a SamplingBatch has them."""
    return {
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_k": np.array([max(p.top_k or 0, 0) for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "repetition_penalty": np.array([p.repetition_penalty for p in params], np.float32),
    }


def row_logprobs(found: TopLogprobs, row: int, count: int) -> TokenLogprobs:
    """One row of the arrays, with its `count` most likely tokens."""
    ids, values = found.top_ids[row, :count].tolist(), found.top_logprobs[row, :count].tolist()
    return TokenLogprobs(float(found.logprobs[row]), tuple(zip(ids, values, strict=True)))


def _mask(sequence: SampledSequence, vocab_limit: int) -> np.ndarray | None:
    """What the sequence's guide allows: (words,) uint32, or None for everything.

    A guide that fails, or is at a dead end, allows nothing: the op finds no token, and its sequence ends with an error.
    """
    if sequence.guide is None:
        return None
    words = np.zeros(_num_words(vocab_limit), np.uint32)
    try:
        if not sequence.guide.allow(words):
            return None
    except DeadEndError:
        return np.zeros_like(words)
    except Exception:
        log.exception("a guide failed; its sequence ends with an error")
        return np.zeros_like(words)
    num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
    return _without_ends(words, sequence, vocab_limit) if num_output < sequence.params.min_tokens else words


def _without_ends(words: np.ndarray, sequence: SampledSequence, vocab_limit: int) -> np.ndarray:
    """A mask without the sequence's end tokens, or as it is where these alone are allowed."""
    others = words.copy()
    for token_id in sequence.end_token_ids:
        if token_id < vocab_limit:
            others[token_id // 32] &= ~(np.uint32(1) << np.uint32(token_id % 32))
    if vocab_limit % 32:  # the last bits may be set, and stand for no token
        others[-1] &= np.uint32(2 ** (vocab_limit % 32) - 1)
    return others if others.any() else words


def _offsets(sequence: SampledSequence, *, guided: bool) -> dict[int, float]:
    """What is added to the logits of which ids."""
    params, output = sequence.params, sequence.token_ids[sequence.num_prompt_tokens :]
    offsets = dict(params.logit_bias or {})
    if params.presence_penalty or params.frequency_penalty:
        for token_id, count in sequence.output_counts.items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            offsets[token_id] = offsets.get(token_id, 0.0) - penalty
    for *beginning, last in params.bad_word_ids:
        if output[len(output) - len(beginning) :] == beginning:
            offsets[last] = -math.inf
    if len(output) < params.min_tokens and not guided:
        offsets.update(dict.fromkeys(sequence.end_token_ids, -math.inf))
    return offsets


def _starts(rows: Sequence[Any]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int32)


def _places(masks: Sequence[np.ndarray | None]) -> np.ndarray:
    """0, 1, 2, ... for the rows that have a mask, -1 for the others."""
    has_mask = np.array([mask is not None for mask in masks], bool)
    return np.where(has_mask, np.cumsum(has_mask) - 1, -1).astype(np.int32)


def _num_words(vocab_limit: int) -> int:
    return -(-vocab_limit // 32)
