"""What may enter the engine, and as what: requests are checked here, and become sequences and beam searches.

Everything that can never be served is refused here, with the field and the numbers, so that what is queued can run.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.errors import ContextLengthError, RequestError
from cupyllm.model_config import GenerationDefaults, ModelConfig
from cupyllm.sampling import MAX_LOGPROBS, SamplingParams
from cupyllm.sequence import Sequence
from cupyllm.token_guide import AllowedIds

# A search chooses by the model's own probabilities, so whatever changes these is off.
_NEUTRAL = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


class Admission:
    """The limits of one engine. `check` may be called by any thread, the rest belongs to the engine's."""

    def __init__(
        self,
        model_config: ModelConfig,
        defaults: GenerationDefaults,
        *,
        max_model_len: int,
        max_decode_batch_size: int,
        vocab_limit: int,
        has_head: bool,
        seed: int | None,
    ) -> None:
        self.model_config = model_config
        self.defaults = defaults
        self.max_model_len = max_model_len
        self._max_decode_batch_size = max_decode_batch_size
        self._vocab_limit = vocab_limit
        self._has_head = has_head
        self._seeds = None if seed is None else np.random.default_rng(seed)
        self._next_id = 0

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> None:
        """Refuse what can never be served: raises RequestError naming the field."""
        if len(prompt_ids) == 0:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        if not self._has_head and (params.max_tokens != 0 or params.prompt_logprobs is not None):
            raise RequestError("this model was saved without its output head: it can only embed", param="model")
        self._check_ids(params.stop_token_ids, "stop_token_ids", "stop_token_ids entry {place}")
        self._check_ids(tuple(params.logit_bias or ()), "logit_bias", "logit_bias key {place}")
        allowed = params.allowed_token_ids
        self._check_ids(allowed or (), "allowed_token_ids", "allowed_token_ids entry {place}")
        if allowed is not None and min(allowed) >= self._vocab_limit:
            raise RequestError("allowed_token_ids holds no id that has a token", param="allowed_token_ids")
        self._check_length(len(prompt_ids), params)  # first: to look at millions of ids takes time
        self._check_ids(prompt_ids, "prompt", "prompt token {place}")

    def make_sequence(self, prompt_ids: Seq[int], params: SamplingParams, priority: int, cache_salt: str) -> Sequence:
        """A sequence for a prompt that has been checked, with the model's defaults where the params say nothing."""
        params = params.filled(self.defaults)
        end_ids = () if params.ignore_eos else self.model_config.end_token_ids
        sequence = Sequence(
            id=self.new_id(),
            token_ids=list(prompt_ids),
            num_prompt_tokens=len(prompt_ids),
            params=params,
            seed=self._fresh_seed() if params.seed is None else params.seed % 2**64,
            max_tokens=self._max_tokens(params.max_tokens, prompt_ids),
            end_token_ids=frozenset((*end_ids, *params.stop_token_ids)),
            priority=priority,
            cache_salt=cache_salt,
        )
        if params.guide is not None:
            sequence.guide = params.guide.start()
        elif params.allowed_token_ids is not None:
            sequence.guide = AllowedIds(params.allowed_token_ids)
        return sequence

    def make_search(self, prompt_ids: Seq[int], beam: BeamParams) -> tuple[BeamSearch, SamplingParams]:
        """A search, and the params of the sequence that begins it. Raises RequestError for one that needs too much."""
        if beam.beam_width > self._max_decode_batch_size:
            raise RequestError(
                f"beam_width {beam.beam_width} needs as many rows, and max_decode_batch_size is "
                f"{self._max_decode_batch_size}",
                param="beam_width",
            )
        end_ids = () if beam.ignore_eos else self.model_config.end_token_ids
        search = BeamSearch(
            beam,
            frozenset((*end_ids, *beam.stop_token_ids)),
            self._max_tokens(beam.max_tokens, prompt_ids),
            len(prompt_ids),
        )
        if search.num_offers > MAX_LOGPROBS:
            raise RequestError(
                f"beam_width {beam.beam_width} with {len(search.end_token_ids)} end tokens needs {search.num_offers} "
                f"candidates a beam; at most {MAX_LOGPROBS} are supported",
                param="beam_width",
            )
        params = replace(
            _NEUTRAL,
            max_tokens=beam.max_tokens,
            stop_token_ids=beam.stop_token_ids,
            ignore_eos=beam.ignore_eos,
            logprobs=search.num_offers,
        )
        return search, params

    def new_id(self) -> int:
        """The next sequence's id; ids grow."""
        self._next_id += 1
        return self._next_id - 1

    def _max_tokens(self, asked: int | None, prompt_ids: Seq[int]) -> int:
        return self.max_model_len - len(prompt_ids) if asked is None else asked

    def _check_length(self, prompt_length: int, params: SamplingParams) -> None:
        room = self.max_model_len - prompt_length
        if params.max_tokens is None and params.min_tokens > room > 0:
            raise ContextLengthError(
                f"min_tokens is {params.min_tokens}, but after {prompt_length} tokens of prompt the context of "
                f"{self.max_model_len} holds {room} more",
                param="min_tokens",
            )
        output = 1 if params.max_tokens is None else params.max_tokens
        if output > room:
            raise ContextLengthError(
                f"the context holds {self.max_model_len} tokens, but {prompt_length + output} were asked for: "
                f"{prompt_length} in the prompt and {'at least 1' if params.max_tokens is None else output} to "
                "generate; shorten the prompt or lower max_tokens",
                param="prompt",
            )

    def _check_ids(self, token_ids: Seq[int], param: str, what: str) -> None:
        vocab_size = self.model_config.vocab_size
        if len(token_ids) == 0 or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
        place, wrong = next((p, t) for p, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise RequestError(
            f"{what.format(place=place)} is {wrong}; token ids go from 0 to {vocab_size - 1}", param=param
        )

    def _fresh_seed(self) -> int:
        """A seed for a request that gave none: reproducible when the config has a seed, else from the system."""
        if self._seeds is None:
            return secrets.randbits(64)
        return int(self._seeds.integers(2**64, dtype=np.uint64))
