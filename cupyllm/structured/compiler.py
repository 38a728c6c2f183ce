"""From a grammar to a Guide: compiling with llguidance, within bounds, and remembering what was compiled.

llguidance (MIT, no dependencies) keeps a lexer and an Earley parser in step with the output and walks them along a
trie of the vocabulary to find the tokens that may come next. benchmarks/structured.py measures it beside another.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyllm.errors import DeadEndError, RequestError
from cupyllm.structured.grammar import Grammar, library_is_missing
from cupyllm.token_guide import TokenGuide
from cupyllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CACHE_SIZE = 32
_MAX_LEXER_STATES = 100_000  # of one answer; about 1 kB each
_NUM_TRIALS = 4
_TRIAL_STEPS = 8
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


class GuideCompiler:
    """Compiles grammars for one model. Any thread may use it; it compiles one grammar at a time.

    vocab_limit    ids from here on have no token
    end_token_ids  what may follow a complete output; the model's end tokens
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Sequence[int], *, vocab_limit: int) -> None:
        self.tokenizer = tokenizer
        self._end_token_ids = [token_id for token_id in end_token_ids if token_id < vocab_limit]
        self._vocab_limit = vocab_limit
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compile_text = lru_cache(CACHE_SIZE)(self._compile_anew)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The guide of a grammar. A text that was compiled lately is not compiled again.

        Raises RequestError naming the grammar's field: the grammar is wrong or too large, llguidance is not installed,
        or the model has no end token. May take a second, the first time as long as `prepare` takes besides.
        """
        try:
            return CompiledGrammar(self._compile_text(grammar.text), grammar.param)
        except ImportError:
            raise library_is_missing(grammar.param) from None
        except _RefusedError as error:
            reason = str(error) if grammar.has_own_lines else _PLACE.sub("", str(error))
            raise RequestError(f"{grammar.param} cannot be used: {reason}", param=grammar.param) from None

    def prepare(self) -> None:
        """Give the library the vocabulary now rather than with the first grammar: 0.9 s for Qwen's."""
        with self._lock:
            self._library_vocabulary()

    def _compile_anew(self, text: str) -> LLMatcher:
        with self._lock:
            vocabulary = self._library_vocabulary()
            from llguidance import LLMatcher

            matcher = LLMatcher(vocabulary, text, log_level=0, limits=_limits())
            _refuse_failed(matcher)
            _try(matcher, self._vocab_limit)
            return matcher

    def _library_vocabulary(self) -> LLTokenizer:
        if not self._end_token_ids:
            raise _RefusedError("this model has no end token, so no grammar could ever be complete")
        if self._vocabulary is None:
            from llguidance import LLTokenizer

            vocabulary: Any = _Vocabulary(self.tokenizer, self._end_token_ids[0], self._vocab_limit)
            self._vocabulary = LLTokenizer(vocabulary, n_vocab=self._vocab_limit, eos_token=self._end_token_ids)
        return self._vocabulary


class _RefusedError(Exception):
    """Why a grammar cannot be used, in one line."""


@dataclass(frozen=True)
class CompiledGrammar:
    """A Guide: a matcher that has seen no token yet, to be copied, and the field of the request that asked for it."""

    matcher: LLMatcher
    param: str

    def start(self) -> TokenGuide:
        return _GrammarGuide(self.matcher.deep_copy(), self.param)


class _GrammarGuide:
    """A TokenGuide: a matcher that has seen an answer so far."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher = matcher
        self._param = param

    def allow(self, words: np.ndarray) -> bool:
        """As in TokenGuide. A grammar that becomes too complex on the way is a dead end too."""
        _fill(self._matcher, words)
        if self._matcher.is_error():  # the library then allows the end token, and the text would look complete
            raise DeadEndError(
                f"{self._param} led the answer to a dead end ({_reason(self._matcher)}); change it so that all that it "
                "lets an answer begin with can be completed, or make it simpler",
                param=self._param,
            )
        return True

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class _Vocabulary:
    """What the library wants to know of a tokenizer. No added token is part of any text: a grammar has to name it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, vocab_limit: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_limit)]
        self.special_token_ids = [i for i in tokenizer.added_tokens.values() if i < vocab_limit]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, control_tokens=False)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


def _fill(matcher: LLMatcher, words: np.ndarray) -> None:
    from llguidance.numpy import fill_next_token_bitmask

    fill_next_token_bitmask(matcher, words.view(np.int32)[np.newaxis])


def _try(matcher: LLMatcher, vocab_limit: int) -> None:
    """Take a few steps on trial: what no text can satisfy, and what is too complex, mostly fails there.

    Every answer then begins with a matcher that has worked out its first step.
    """
    words = np.zeros(-(-vocab_limit // 32), np.uint32)
    _fill(matcher, words)
    _refuse_failed(matcher)
    for share in np.linspace(0, 1, _NUM_TRIALS):
        trial = matcher.deep_copy()
        for _ in range(_TRIAL_STEPS):
            _fill(trial, words)
            _refuse_failed(trial)
            if trial.is_stopped():
                break
            places = np.flatnonzero(words)  # unpacking all the bits would take longer than the rest
            place = int(places[int(share * (len(places) - 1))])
            trial.consume_token(32 * place + int(words[place]).bit_length() - 1)


def _refuse_failed(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise _RefusedError(_reason(matcher))


def _reason(matcher: LLMatcher) -> str:
    """What the library says, in one line: its drawings of the place of an error would take several."""
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    told = [line for line in lines if line and not line.startswith(("<", "^")) and "|" not in line[:6]]
    reason = " ".join(told)[:300]
    return "no text can satisfy it" if reason.startswith("NoExtension") else reason
