"""cupyllm in a program, without a server.

from cupyllm import LLM, SamplingParams
llm = LLM("demo")
for output in llm.chat([{"role": "user", "content": "What is a page table?"}], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from cupyllm.answer_stream import DAMAGED, AnswerPiece, stream_answer
from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.config import EngineConfig, load_config
from cupyllm.errors import DeadEndError, EngineError, RequestError
from cupyllm.messages import normalise_messages
from cupyllm.output import OutputText, with_bad_word_ids
from cupyllm.reasoning import ThinkTokens
from cupyllm.sampling import SamplingParams
from cupyllm.sampling_batch import TokenLogprobs
from cupyllm.sequence import FinishReason, Sequence
from cupyllm.startup import load_engine
from cupyllm.step_result import TokenEvent
from cupyllm.structured.grammar import grammar_of
from cupyllm.token_guide import Guide
from cupyllm.tokenizer import Tokenizer
from cupyllm.tools import normalise_tools


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


class LLM:
    """A model in this process. `model` is "demo", a folder or a hub name; other config keys go by name."""

    def __init__(self, model: str = "demo", *, show_progress: bool = True, **config: Any) -> None:
        self.config = load_config(EngineConfig, overrides={"model": model, **config})
        loaded = load_engine(self.config, show_progress=show_progress)
        self.engine = loaded.engine
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template
        self.embedding = loaded.embedding
        self.guides = loaded.guides

    def generate(
        self,
        prompts: str | Seq[str] | Seq[int] | Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, text or token ids, all in one continuous batch; answers in the order of the
        prompts. With `n` in its params a prompt is computed once and answered n times.

        `params` is one for all prompts or one for each. Raises RequestError for a prompt that can never be served, and
        DeadEndError where an answer could not go on within its guide.
        """
        as_ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in _as_prompts(prompts)]
        return self._run(as_ids, _as_params(params, len(as_ids)), show_progress)

    def chat(
        self,
        messages: Seq[dict[str, Any]] | Seq[Seq[dict[str, Any]]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of OpenAI chat messages."""
        as_ids = [self._encode_chat(conversation, tools) for conversation in _as_prompts(messages)]
        return self._run(as_ids, _as_params(params, len(as_ids)), show_progress)

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[AnswerPiece]:
        """The answer to one prompt (text, token ids or a list of chat messages) as it is written.

        Closing the iterator ends the answer. Raises what `generate` raises.
        """
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        marks = ThinkTokens.of(self.tokenizer) if is_chat else None
        return stream_answer(self.engine, self.tokenizer, self._encode(prompt), params or SamplingParams(), marks)

    def beam_search(
        self,
        prompts: str | Seq[str] | Seq[int] | Seq[Seq[int]] | Seq[dict[str, Any]] | Seq[Seq[dict[str, Any]]],
        params: BeamParams | None = None,
        *,
        n: int = 1,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or answer one conversation, or many, by beam search: the `n` best of each, best first.

        The checkpoint's sampling defaults do not apply. Raises RequestError for what can never be served.
        """
        params = params or BeamParams()
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= params.beam_width:
            raise RequestError(f"n must be a whole number from 1 to beam_width ({params.beam_width})", param="n")
        as_ids = [self._encode(prompt) for prompt in _as_prompts(prompts)]
        limits = SamplingParams(max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids)
        for prompt_ids in as_ids:  # refuse before anything has run
            self.engine.check(prompt_ids, limits)
        searches: list[BeamSearch] = []
        self._exhaust(self._finish_searches(as_ids, params, searches), len(as_ids), show_progress and len(as_ids) > 1)
        return [
            RequestOutput(tuple(prompt_ids), _best_beams(search, n, self.tokenizer))
            for prompt_ids, search in zip(as_ids, searches, strict=True)
        ]

    def guide(
        self,
        *,
        json_schema: dict[str, Any] | None = None,
        json_object: bool = False,
        regex: str | None = None,
        choice: Seq[str] | None = None,
        grammar: str | None = None,
    ) -> Guide:
        """For `SamplingParams(guide=...)`: answers that are valid by a JSON schema, any JSON object, what a regular
        expression matches, one of several texts, or what a grammar (Lark or GBNF) derives. One of them is given.

        Raises RequestError naming it when it cannot be used.
        """
        found = grammar_of(
            [
                ("json", json_schema, "json_schema"),
                ("json_object", json_object or None, "json_object"),
                ("regex", regex, "regex"),
                ("choice", choice, "choice"),
                ("grammar", grammar, "grammar"),
            ]
        )
        if found is None:
            raise RequestError("guide needs one of json_schema, json_object, regex, choice and grammar")
        return self.guides.compile(found)

    def embed(
        self,
        inputs: str | Seq[str] | Seq[int] | Seq[Seq[int]],
        *,
        dimensions: int | None = None,
        show_progress: bool = True,
    ) -> np.ndarray:
        """One vector for each input, text or token ids: (inputs, C) float32, made as the checkpoint says.

        With `dimensions` only so many of them, for models trained to be cut. Raises RequestError for what can never be
        embedded, and EngineError when the model gives numbers that are not finite.
        """
        self.embedding.check(dimensions, self.engine.runner.model.config.hidden_size)
        as_ids = [self._encode_text(one) for one in _as_prompts(inputs)]
        for prompt_ids in as_ids:  # refuse before anything has run
            self.engine.check(prompt_ids, SamplingParams(max_tokens=0))
        sequences: list[Sequence] = []
        self._exhaust(self._finish_embeddings(as_ids, sequences), len(as_ids), show_progress and len(as_ids) > 1)
        pooled = [sequence.readout.embedding for sequence in sequences if sequence.readout is not None]
        if not all(np.isfinite(vector).all() for vector in pooled):
            raise EngineError("the model gave no finite hidden states; the checkpoint or its dtype is damaged")
        return np.stack([self.embedding.finish(vector, dimensions) for vector in pooled])

    def _encode_text(self, one: str | Seq[int]) -> list[int]:
        if isinstance(one, str):
            return self.tokenizer.with_special_tokens(self.tokenizer.encode(one))
        return list(one)

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if len(prompt) > 0 and isinstance(prompt[0], dict):
            return self._encode_chat(prompt)
        return list(prompt)

    def _encode_chat(self, messages: Any, tools: list[dict[str, Any]] | None = None) -> list[int]:
        if self.chat_template is None:
            raise RequestError("this model has no chat template; use text or token ids", param="messages")
        return self.chat_template.encode(normalise_messages(messages), tools=normalise_tools(tools or []))

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], show_progress: bool) -> list[RequestOutput]:
        params = [with_bad_word_ids(one, self.tokenizer) for one in params]
        for prompt_ids, one in zip(prompts, params, strict=True):  # refuse before anything has run
            self.engine.check(prompt_ids, one)
            if one.n > self.config.max_waiting:
                raise RequestError(f"n is {one.n}, but at most {self.config.max_waiting} (max_waiting) wait", param="n")
        pending = [[_Pending(OutputText(self.tokenizer, one)) for _ in range(one.n)] for one in params]
        num_answers = sum(map(len, pending))
        self._exhaust(self._finish(prompts, params, pending), num_answers, show_progress and len(prompts) > 1)
        return [
            RequestOutput(tuple(prompt_ids), tuple(map(_as_output, answers)), answers[0].prompt_logprobs)
            for prompt_ids, answers in zip(prompts, pending, strict=True)
        ]

    def _exhaust(self, ended: Iterator[Any], count: int, show_progress: bool) -> None:
        """Run until all `count` have ended, with a bar; leave nothing in the engine if that fails."""
        with tqdm(total=count, desc="generating", disable=not show_progress) as bar:
            try:
                for _ in ended:
                    bar.update()
            except BaseException:
                self.engine.abort_all()
                raise

    def _finish(
        self, prompts: list[list[int]], params: list[SamplingParams], pending: list[list[_Pending]]
    ) -> Iterator[_Pending]:
        """Run until every answer has ended, and give each when it has."""
        by_sequence: dict[int, _Pending] = {}
        added = 0
        while added < len(prompts) or by_sequence:
            while added < len(prompts) and self.engine.num_waiting + params[added].n <= self.config.max_waiting:
                sequences = self.engine.add_parallel(prompts[added], params[added].split())
                by_sequence |= {s.id: answer for s, answer in zip(sequences, pending[added], strict=True)}
                added += 1
            for event in self.engine.step():
                answer = by_sequence.get(event.sequence.id)
                if answer is None:
                    continue  # a stop string ended it with the token before, which came in the same step
                answer.push(event)
                if answer.text.finish_reason is not None:
                    self.engine.abort(event.sequence)  # the engine does not know of stop strings
                    yield by_sequence.pop(event.sequence.id)

    def _finish_searches(
        self, prompts: list[list[int]], params: BeamParams, searches: list[BeamSearch]
    ) -> Iterator[BeamSearch]:
        """Search for every prompt, and give each search when it has ended; `searches` gets them in order."""
        num_live = 0
        while len(searches) < len(prompts) or num_live:
            while len(searches) < len(prompts) and self.engine.num_waiting < self.config.max_waiting:
                searches.append(self.engine.add_beams(prompts[len(searches)], params))
                num_live += 1
            for search in self.engine.step().ended_searches:
                num_live -= 1
                yield search

    def _finish_embeddings(self, prompts: list[list[int]], sequences: list[Sequence]) -> Iterator[Sequence]:
        """Read every prompt, and give its sequence when it has been read; `sequences` gets them in order."""
        num_ended = 0
        while num_ended < len(prompts):
            while len(sequences) < len(prompts) and self.engine.num_waiting < self.config.max_waiting:
                sequences.append(self.engine.add_embedding(prompts[len(sequences)], self.embedding.pooling))
            for event in self.engine.step():
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


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt or conversation as a list of one; many as they are."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | dict)):
        return [prompts]
    return list(prompts)


def _as_params(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params were given for {count} prompts", param="params")
    return list(params)
