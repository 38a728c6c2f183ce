"""Many prompts to their answers, without a server: the engine's queue is kept filled until the last one has ended.

When anything fails, or the caller is interrupted, nothing is left in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from cupyllm.answer_stream import DAMAGED
from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.engine import Engine
from cupyllm.errors import DeadEndError, EngineError, RequestError
from cupyllm.output import OutputText, with_bad_word_ids
from cupyllm.prompt_readout import Pooling
from cupyllm.sampling import SamplingParams
from cupyllm.sampling_batch import TokenLogprobs
from cupyllm.sequence import FinishReason, Sequence
from cupyllm.step_result import TokenEvent
from cupyllm.tokenizer import Tokenizer


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop" or "length"; `logprobs` is None unless they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt as token ids, and its n answers.

    `prompt_logprobs` is None unless they were asked for; the first token of a prompt has none.
    """

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass
class _Pending:
    """An answer on its way: what has been made of it so far."""

    text: OutputText
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    dead_end: DeadEndError | None = None

    def push(self, event: TokenEvent) -> None:
        readout = event.sequence.readout
        if readout is not None and readout.num_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = tuple(readout.logprobs)
        self.pieces.append(self.text.push(event).content)
        self.dead_end = event.sequence.dead_end
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)


def answer_all(
    engine: Engine, tokenizer: Tokenizer, prompts: list[list[int]], params: list[SamplingParams], show_progress: bool
) -> list[RequestOutput]:
    """Answer every prompt by its params, in order. Raises what LLM.generate raises."""
    params = [with_bad_word_ids(one, tokenizer) for one in params]
    for prompt_ids, one in zip(prompts, params, strict=True):  # refuse before anything has run
        engine.check(prompt_ids, one)
        if one.n > engine.config.max_waiting:
            raise RequestError(f"n is {one.n}, but at most {engine.config.max_waiting} (max_waiting) wait", param="n")
    pending = [[_Pending(OutputText(tokenizer, one)) for _ in range(one.n)] for one in params]
    num_answers = sum(map(len, pending))
    _exhaust(engine, _finish(engine, prompts, params, pending), num_answers, show_progress and len(prompts) > 1)
    return [
        RequestOutput(tuple(prompt_ids), tuple(map(_as_output, answers)), answers[0].prompt_logprobs)
        for prompt_ids, answers in zip(prompts, pending, strict=True)
    ]


def search_all(
    engine: Engine, tokenizer: Tokenizer, prompts: list[list[int]], params: BeamParams, n: int, show_progress: bool
) -> list[RequestOutput]:
    """The `n` best answers to every prompt, in order. Raises what LLM.beam_search raises."""
    limits = SamplingParams(max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids)
    for prompt_ids in prompts:  # refuse before anything has run
        engine.check(prompt_ids, limits)
    searches: list[BeamSearch] = []
    ended = _finish_searches(engine, prompts, params, searches)
    _exhaust(engine, ended, len(prompts), show_progress and len(prompts) > 1)
    return [
        RequestOutput(tuple(prompt_ids), _best_beams(search, n, tokenizer))
        for prompt_ids, search in zip(prompts, searches, strict=True)
    ]


def read_all(engine: Engine, prompts: list[list[int]], pooling: Pooling, show_progress: bool) -> list[np.ndarray]:
    """The pooled hidden state of every prompt, (C,) float32, in order. Raises RequestError for one that is too long."""
    for prompt_ids in prompts:  # refuse before anything has run
        engine.check(prompt_ids, SamplingParams(max_tokens=0))
    sequences: list[Sequence] = []
    ended = _finish_reading(engine, prompts, pooling, sequences)
    _exhaust(engine, ended, len(prompts), show_progress and len(prompts) > 1)
    return [sequence.readout.embedding for sequence in sequences if sequence.readout is not None]


def _exhaust(engine: Engine, ended: Iterator[Any], count: int, show_progress: bool) -> None:
    """Run until all `count` have ended, with a bar; leave nothing in the engine if that fails."""
    with tqdm(total=count, desc="generating", disable=not show_progress) as bar:
        try:
            for _ in ended:
                bar.update()
        except BaseException:
            engine.abort_all()
            raise


def _finish(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], pending: list[list[_Pending]]
) -> Iterator[_Pending]:
    """Run until every answer has ended, and give each when it has."""
    by_sequence: dict[int, _Pending] = {}
    added = 0
    while added < len(prompts) or by_sequence:
        while added < len(prompts) and engine.num_waiting + params[added].n <= engine.config.max_waiting:
            sequences = engine.add_parallel(prompts[added], params[added].split())
            by_sequence |= {s.id: answer for s, answer in zip(sequences, pending[added], strict=True)}
            added += 1
        for event in engine.step():
            answer = by_sequence.get(event.sequence.id)
            if answer is None:
                continue  # a stop string ended it with the token before, which came in the same step
            answer.push(event)
            if answer.text.finish_reason is not None:
                engine.abort(event.sequence)  # the engine does not know of stop strings
                yield by_sequence.pop(event.sequence.id)


def _finish_searches(
    engine: Engine, prompts: list[list[int]], params: BeamParams, searches: list[BeamSearch]
) -> Iterator[BeamSearch]:
    """Search for every prompt, and give each search when it has ended; `searches` gets them in order."""
    num_live = 0
    while len(searches) < len(prompts) or num_live:
        while len(searches) < len(prompts) and engine.num_waiting < engine.config.max_waiting:
            searches.append(engine.add_beams(prompts[len(searches)], params))
            num_live += 1
        for search in engine.step().ended_searches:
            num_live -= 1
            yield search


def _finish_reading(
    engine: Engine, prompts: list[list[int]], pooling: Pooling, sequences: list[Sequence]
) -> Iterator[Sequence]:
    """Read every prompt, and give its sequence when it has been read; `sequences` gets them in order."""
    num_ended = 0
    while num_ended < len(prompts):
        while len(sequences) < len(prompts) and engine.num_waiting < engine.config.max_waiting:
            sequences.append(engine.add_embedding(prompts[len(sequences)], pooling))
        for event in engine.step():
            num_ended += 1
            yield event.sequence


def _as_output(answer: _Pending) -> CompletionOutput:
    reason = answer.text.finish_reason
    if reason is FinishReason.ERROR:
        raise answer.dead_end or EngineError(DAMAGED)
    assert reason is not None
    return CompletionOutput(
        "".join(answer.pieces), tuple(answer.token_ids), reason.value, tuple(answer.logprobs) or None
    )


def _best_beams(search: BeamSearch, n: int, tokenizer: Tokenizer) -> tuple[CompletionOutput, ...]:
    if search.failed:
        raise EngineError(DAMAGED)
    outputs = []
    for beam in search.finished[:n]:
        text = tokenizer.decode(beam.token_ids[: -1 if beam.ended else None])
        reason = FinishReason.STOP if beam.ended else FinishReason.LENGTH
        outputs.append(CompletionOutput(text, beam.token_ids, reason.value, None))
    return tuple(outputs)
