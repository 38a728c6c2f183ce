"""cupyllm in a program, without a server.

from cupyllm import LLM, SamplingParams
llm = LLM("demo")
for output in llm.chat([{"role": "user", "content": "What is a page table?"}], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from cupyllm.answer_batch import RequestOutput, answer_all, read_all, search_all
from cupyllm.answer_stream import AnswerPiece, stream_answer
from cupyllm.beam_search import BeamParams
from cupyllm.config import EngineConfig, load_config
from cupyllm.errors import EngineError, RequestError
from cupyllm.messages import normalise_messages
from cupyllm.reasoning import ThinkTokens
from cupyllm.sampling import SamplingParams
from cupyllm.startup import load_engine
from cupyllm.structured.grammar import grammar_of
from cupyllm.token_guide import Guide
from cupyllm.tools import normalise_tools


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
        return answer_all(self.engine, self.tokenizer, as_ids, _as_params(params, len(as_ids)), show_progress)

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
        return answer_all(self.engine, self.tokenizer, as_ids, _as_params(params, len(as_ids)), show_progress)

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
        return search_all(self.engine, self.tokenizer, as_ids, params, n, show_progress)

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
        pooled = read_all(self.engine, as_ids, self.embedding.pooling, show_progress)
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
