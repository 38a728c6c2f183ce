"""How a request wants its tokens chosen: the user's parameters, checked, and the arrays the sampling op reads.

The op itself is `ReferenceOps.sample` (ops/reference.py) and its CUDA twin. Order of work, as in Hugging Face's
transformers: repetition penalty, temperature, top-k, top-p, min-p, then one draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cupyllm.errors import RequestError
from cupyllm.model_config import GenerationDefaults

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_ANSWERS = 16
# Below this a division by the temperature could overflow; the result would be greedy anyway.
GREEDY_BELOW = 1e-4
_NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. None means: the checkpoint's generation_config.json decides, else the neutral value.

    temperature         0 is greedy; up to 2
    top_k               keep the k most likely tokens; 0 or -1 keeps all
    top_p               keep the most likely tokens that together reach this probability; in (0, 1]
    min_p               drop tokens less likely than this share of the most likely one; in [0, 1]
    repetition_penalty  above 1 makes tokens of prompt and output less likely (Keskar et al., CTRL, 2019)
    seed                any whole number from -2**63 to 2**64-1; the same seed gives the same tokens alone and in
                        any batch
    max_tokens          at most this many output tokens; None is all that fits
    stop                up to 4 strings that end the text; they are not part of it
    stop_token_ids      token ids that end the output like an end token
    ignore_eos          keep going after an end token
    logprobs            None, or how many of the most likely tokens to report beside the chosen one (0 to 20); the
                        values are of the model's own distribution, before penalties and temperature
    n                   how many answers to each prompt, 1 to 16; the prompt is computed once. An engine runs single
                        answers and does not look at it: `split` makes them

    Raises RequestError naming the field.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda v: 0 <= v <= 2, "a number from 0 to 2")
        _check_number("top_p", self.top_p, lambda v: 0 < v <= 1, "a number above 0 and at most 1")
        _check_number("min_p", self.min_p, lambda v: 0 <= v <= 1, "a number from 0 to 1")
        _check_number(
            "repetition_penalty", self.repetition_penalty, lambda v: 0 < v <= 10, "a number above 0, at most 10"
        )
        _check_whole("top_k", self.top_k, lambda v: -1 <= v < 2**31, "-1 or 0 (off), or a whole number of 1 or more")
        _check_whole("seed", self.seed, lambda v: -(2**63) <= v < 2**64, "a whole number from -2**63 to 2**64-1")
        _check_whole("max_tokens", self.max_tokens, lambda v: v >= 1, "a whole number of 1 or more")
        _check_whole(
            "logprobs", self.logprobs, lambda v: 0 <= v <= MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}"
        )
        object.__setattr__(self, "n", 1 if self.n is None else self.n)
        _check_whole("n", self.n, lambda v: 1 <= v <= MAX_ANSWERS, f"a whole number from 1 to {MAX_ANSWERS}")
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, not {self.ignore_eos!r}", param="ignore_eos")

    def filled(self, defaults: GenerationDefaults) -> SamplingParams:
        """The same parameters with every None that has a default replaced by it."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: getattr(defaults, name) if value is None else value for name, value in given.items()}
        )

    def split(self) -> list[SamplingParams]:
        """The parameters of each of the n answers. Answer k has the seed `seed + k` (modulo 2**64), if there is one:
        the answers differ, and each can be had again, alone too.
        """
        seeds = [None if self.seed is None else (self.seed + k) % 2**64 for k in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of R rows of logits, as arrays.

    Penalised ids are ragged: row r owns penalty_ids[penalty_starts[r]:penalty_starts[r + 1]], each id once.
    """

    temperature: np.ndarray  # (R,) float32; 0 is greedy
    top_k: np.ndarray  # (R,) int32; 0 is off
    top_p: np.ndarray  # (R,) float32; 1 is off
    min_p: np.ndarray  # (R,) float32; 0 is off
    repetition_penalty: np.ndarray  # (R,) float32; 1 is off
    penalty_starts: np.ndarray  # (R + 1,) int32
    penalty_ids: np.ndarray  # (N,) int32
    seeds: np.ndarray  # (R,) uint64
    positions: np.ndarray  # (R,) int32, the token's place in its sequence: the counter of the random numbers
    num_logprobs: int  # top tokens wanted by the row that wants most; -1 when none wants logprobs
    vocab_limit: int  # ids from here on have no token and are never chosen


class SampledSequence(Protocol):
    """What sampling needs to know of a sequence (sequence.py)."""

    token_ids: list[int]
    distinct_ids: set[int]
    params: SamplingParams
    seed: int


@dataclass(frozen=True)
class SampleResult:
    """What the sampling op answers for R rows. The logprob arrays are empty when none were asked for."""

    token_ids: np.ndarray  # (R,) int32; -1 where a row held NaN or nothing finite
    logprobs: np.ndarray  # (R,) float32, of the chosen token
    top_ids: np.ndarray  # (R, num_logprobs) int32, most likely first
    top_logprobs: np.ndarray  # (R, num_logprobs) float32


class SamplingBatchBuilder:
    """Lays the sampling parameters of sequences out as arrays; kept while the same sequences are sampled."""

    def __init__(self, vocab_limit: int) -> None:
        self._vocab_limit = vocab_limit
        self._sequences: list[Any] = []
        self._kept: SamplingBatch | None = None

    def build(self, sequences: list[Any]) -> SamplingBatch:
        """The arrays for the sequences (SampledSequence) whose next token is wanted, one row each."""
        if self._kept is not None and sequences == self._sequences:
            # Every one of them got a token since: only the counter of the random numbers has moved on.
            self._kept = replace(self._kept, positions=self._kept.positions + np.int32(1))
            return self._kept
        batch = build_sampling_batch(sequences, vocab_limit=self._vocab_limit)
        self._sequences = sequences
        self._kept = None if len(batch.penalty_ids) else batch
        return batch


def build_sampling_batch(sequences: Sequence[SampledSequence], *, vocab_limit: int) -> SamplingBatch:
    """The sampling parameters of the sequences whose next token is wanted, as arrays."""
    params = [sequence.params for sequence in sequences]
    penalised = [
        np.fromiter(sequence.distinct_ids, np.int32) if sequence.params.repetition_penalty != 1.0 else _NO_IDS
        for sequence in sequences
    ]
    wanted = [p.logprobs for p in params if p.logprobs is not None]
    return SamplingBatch(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([max(p.top_k or 0, 0) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
        penalty_starts=np.cumsum([0, *map(len, penalised)], dtype=np.int32),
        penalty_ids=np.concatenate(penalised),
        seeds=np.array([sequence.seed for sequence in sequences], np.uint64),
        positions=np.array([len(sequence.token_ids) for sequence in sequences], np.int32),
        num_logprobs=max(wanted, default=-1),
        vocab_limit=vocab_limit,
    )


def _check_number(name: str, value: Any, holds: Any, expected: str) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not holds(value):
        raise RequestError(f"{name} must be {expected}, not {_short(value)}", param=name)


def _check_whole(name: str, value: Any, holds: Any, expected: str) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not holds(value):
        raise RequestError(f"{name} must be {expected}, not {_short(value)}", param=name)


def _as_stop_strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if stops is None:
        return ()
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise RequestError("stop must be a string or a list of strings", param="stop")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop may hold at most {MAX_STOP_STRINGS} strings, not {len(stops)}", param="stop")
    if any(not 1 <= len(text) <= MAX_STOP_CHARACTERS for text in stops):
        raise RequestError(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    return tuple(stops)


def _as_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    whole = isinstance(ids, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
    if not whole or len(ids) > 128:
        raise RequestError("stop_token_ids must be a list of at most 128 token ids", param="stop_token_ids")
    return tuple(ids)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
