"""How a request wants its tokens chosen: the user's parameters, checked.

sampling_batch.py lays them out as arrays; the op that reads these is `ReferenceOps.sample` and its CUDA twin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from cupyllm.errors import RequestError
from cupyllm.model_config import GenerationDefaults
from cupyllm.token_guide import Guide

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_ANSWERS = 16
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for. None means: the checkpoint's generation_config.json decides, else the neutral value.

    temperature         0 is greedy; up to 2
    top_k               keep the k most likely tokens; 0 or -1 keeps all
    top_p               keep the most likely tokens that together reach this probability; in (0, 1]
    min_p               drop tokens less likely than this share of the most likely one; in [0, 1]
    repetition_penalty  above 1 makes tokens of prompt and output less likely (Keskar et al., CTRL, 2019)
    presence_penalty    subtracted from the logits of tokens in the output; from -2 to 2
    frequency_penalty   the same, times how often the token is in the output; from -2 to 2
    logit_bias          token id -> number from -100 to 100 that is added to its logit; up to 1024 of them
    allowed_token_ids   only these may be chosen
    bad_words           texts that the output must not hold; up to 128. An engine looks at `bad_word_ids` instead:
                        their token ids, as `Tokenizer.bad_word_ids` gives them
    guide               what may come next, decided anew for every token, such as by a JSON schema; not with
                        allowed_token_ids. Where it lets only an end token follow, min_tokens does not hold
    seed                any whole number from -2**63 to 2**64-1; the same seed gives the same tokens alone and in
                        any batch
    max_tokens          at most this many output tokens; None is all that fits, 0 only reads the prompt
    min_tokens          no end token, stop token or stop string counts before so many output tokens
    stop                up to 4 strings that end the text; they are not part of it
    stop_token_ids      token ids that end the output like an end token
    include_stop_str_in_output   keep the stop string that ended the text
    ignore_eos          keep going after an end token
    logprobs            None, or how many of the most likely tokens to report beside the chosen one (0 to 20); the
                        values are of the model's own distribution, before penalties and temperature
    prompt_logprobs     the same for every token of the prompt but the first, which follows nothing
    n                   how many answers to each prompt, 1 to 16; the prompt is computed once. An engine runs single
                        answers and does not look at it: `split` makes them

    Raises RequestError naming the field.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    guide: Guide | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_limits()
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}", param=name)
        # What is absent becomes empty, and what is a list a tuple, so that the engine finds one form.
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        object.__setattr__(self, "bad_words", _as_bad_words(self.bad_words))
        if self.allowed_token_ids is not None:
            if self.guide is not None:
                raise RequestError("allowed_token_ids cannot be used with a grammar", param="allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", _as_ids("allowed_token_ids", self.allowed_token_ids, None))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")

    def _check_numbers(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, 0.0 if getattr(self, name) is None else getattr(self, name))
            _check_number(name, getattr(self, name), lambda v: -2 <= v <= 2, "a number from -2 to 2")
        _check_number("temperature", self.temperature, lambda v: 0 <= v <= 2, "a number from 0 to 2")
        _check_number("top_p", self.top_p, lambda v: 0 < v <= 1, "a number above 0 and at most 1")
        _check_number("min_p", self.min_p, lambda v: 0 <= v <= 1, "a number from 0 to 1")
        _check_number(
            "repetition_penalty", self.repetition_penalty, lambda v: 1e-3 <= v <= 10, "a number from 0.001 to 10"
        )
        _check_whole("top_k", self.top_k, lambda v: -1 <= v < 2**31, "-1 or 0 (off), or a whole number of 1 or more")
        _check_whole("seed", self.seed, lambda v: -(2**63) <= v < 2**64, "a whole number from -2**63 to 2**64-1")

    def _check_limits(self) -> None:
        for name, value in (("n", 1), ("min_tokens", 0)):
            object.__setattr__(self, name, value if getattr(self, name) is None else getattr(self, name))
        _check_whole("max_tokens", self.max_tokens, lambda v: v >= 0, "a whole number of 0 or more")
        _check_whole("min_tokens", self.min_tokens, lambda v: v >= 0, "a whole number of 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check_whole(name, value, lambda v: 0 <= v <= MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}")
        _check_whole("n", self.n, lambda v: 1 <= v <= MAX_ANSWERS, f"a whole number from 1 to {MAX_ANSWERS}")

    @cached_property
    def changes_logits(self) -> bool:
        """Whether anything but the repetition penalty is to change the logits, now or in a later step."""
        by_count = self.presence_penalty != 0 or self.frequency_penalty != 0
        return by_count or bool(self.logit_bias or self.bad_word_ids or self.min_tokens or self.is_guided)

    @property
    def penalises(self) -> bool:
        """Whether tokens of prompt or output become more or less likely by having come before."""
        return self.repetition_penalty not in (None, 1.0) or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_guided(self) -> bool:
        return self.guide is not None or self.allowed_token_ids is not None

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


def _as_ids(name: str, ids: Any, most: int | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    whole = isinstance(ids, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
    if not whole or (most is not None and len(ids) > most):
        limit = "" if most is None else f"at most {most} "
        raise RequestError(f"{name} must be a list of {limit}token ids", param=name)
    return tuple(ids)


def _as_biases(biases: Any) -> dict[int, float]:
    """Token id -> bias. JSON can only have strings as keys, so those that are whole numbers count as ids."""
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError("logit_bias must be an object that maps token ids to numbers", param="logit_bias")
    if len(biases) > MAX_LOGIT_BIASES:
        raise RequestError(
            f"logit_bias may hold at most {MAX_LOGIT_BIASES} tokens, not {len(biases)}", param="logit_bias"
        )
    found: dict[int, float] = {}
    for key, value in biases.items():
        text = str(key)
        if isinstance(key, bool) or not (text.isascii() and text.isdecimal() and len(text) <= 10):
            raise RequestError(f"logit_bias has the key {_short(key)}, which is not a token id", param="logit_bias")
        _check_number("logit_bias", value, lambda v: -100 <= v <= 100, "numbers from -100 to 100")
        if value is None or int(text) in found:
            problem = "no number" if value is None else "twice a bias"
            raise RequestError(f"logit_bias has {problem} for token {text}", param="logit_bias")
        found[int(text)] = float(value)
    return found


def _as_bad_words(words: Any) -> tuple[str, ...]:
    if words is None:
        return ()
    texts = not isinstance(words, str) and isinstance(words, Sequence) and all(isinstance(word, str) for word in words)
    if not texts or len(words) > MAX_BAD_WORDS or any(not 1 <= len(word) <= MAX_STOP_CHARACTERS for word in words):
        raise RequestError(
            f"bad_words must be a list of at most {MAX_BAD_WORDS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
            param="bad_words",
        )
    return tuple(words)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
