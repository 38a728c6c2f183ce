"""Beam search as a request asks for it: the fields that belong to it, and those it cannot be combined with.

A search chooses the most likely answers, so whatever makes sampling random or stops at text has no meaning in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupyllm.api.protocol.shared import SharedRequest, asks_for_nothing
from cupyllm.beam_search import BeamParams
from cupyllm.errors import RequestError
from cupyllm.sampling import SamplingParams

# field -> the values that ask for nothing where no search is asked for
_OF_BEAMS: dict[str, tuple[Any, ...]] = {"beam_width": (1,), "length_penalty": (1,), "early_stopping": (False,)}
# field -> the values that ask for nothing within a search
_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stop": ([],),
    "temperature": (0,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "seed": (),
    "best_of": (),
}


def read_beams(ask: SharedRequest, params: Sequence[SamplingParams]) -> list[BeamParams]:
    """The search for each prompt, with the limits of its `params`; none where no search is asked for.

    Raises RequestError naming the field.
    """
    if not ask.use_beam_search:
        _check(ask, _OF_BEAMS, "needs use_beam_search to be true")
        return []
    _check(ask, _NOT_WITH_BEAMS, "cannot be used with use_beam_search")
    given = {name: getattr(ask, name) for name in _OF_BEAMS if getattr(ask, name) is not None}
    beams = [
        BeamParams(**given, max_tokens=one.max_tokens, stop_token_ids=one.stop_token_ids, ignore_eos=one.ignore_eos)
        for one in params
    ]
    width = beams[0].beam_width
    if ask.n > width:
        raise RequestError(f"n is {ask.n}, but a search gives at most beam_width ({width}) answers", param="n")
    return beams


def _check(ask: SharedRequest, fields: dict[str, tuple[Any, ...]], problem: str) -> None:
    for name, neutral in fields.items():
        value = getattr(ask, name, None)  # some fields are of one route only
        if value is not None and not asks_for_nothing(value, neutral):
            raise RequestError(f"{name} {problem}", param=name)
