"""cupyllm in a program, without a server.

from cupyllm import LLM, SamplingParams
llm = LLM("demo")
for output in llm.chat([{"role": "user", "content": "What is a page table?"}], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from cupyllm.config import EngineConfig, load_config
from cupyllm.engine import TokenEvent, TokenLogprobs
from cupyllm.errors import EngineError, RequestError
from cupyllm.messages import normalise_messages
from cupyllm.output import OutputText
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason
from cupyllm.startup import load_engine


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop" or "length"; `logprobs` is None unless they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt as token ids, and its answers (one, until parallel sampling arrives)."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


@dataclass
class _Pending:
    """A request on its way: what it was asked, and what has been made of it so far."""

    prompt_ids: list[int]
    text: OutputText
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def push(self, event: TokenEvent) -> None:
        self.pieces.append(self.text.push(event))
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)


class LLM:
    """A model in this process. `model` is "demo", a folder or a hub name; other config keys go by name."""

    def __init__(self, model: str = "demo", **config: Any) -> None:
        self.config = load_config(EngineConfig, overrides={"model": model, **config})
        loaded = load_engine(self.config)
        self.engine = loaded.engine
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template

    def generate(
        self,
        prompts: str | Seq[str] | Seq[int] | Seq[Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, text or token ids, all in one continuous batch; answers in the order of the
        prompts.

        `params` is one for all prompts or one for each. Raises RequestError for a prompt that can never be served.
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
        if self.chat_template is None:
            raise RequestError("this model has no chat template; use generate()", param="messages")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        as_ids = [self.chat_template.encode(normalise_messages(c), tools=tools) for c in conversations]
        return self._run(as_ids, _as_params(params, len(as_ids)), show_progress)

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], show_progress: bool) -> list[RequestOutput]:
        for prompt_ids, one in zip(prompts, params, strict=True):
            self.engine.check(prompt_ids, one)  # refuse before anything has run
        pending = [
            _Pending(ids, OutputText(self.tokenizer, one.stop)) for ids, one in zip(prompts, params, strict=True)
        ]
        by_sequence: dict[int, _Pending] = {}
        added = 0
        with tqdm(total=len(prompts), desc="generating", disable=not show_progress or len(prompts) < 2) as bar:
            try:
                while added < len(pending) or by_sequence:
                    while added < len(pending) and self.engine.stats.num_waiting < self.config.max_waiting:
                        sequence = self.engine.add(prompts[added], params[added])
                        by_sequence[sequence.id] = pending[added]
                        added += 1
                    for event in self.engine.step():
                        request = by_sequence[event.sequence.id]
                        request.push(event)
                        if request.text.finish_reason is not None:
                            self.engine.abort(event.sequence)  # the engine does not know of stop strings
                            del by_sequence[event.sequence.id]
                            bar.update()
            except BaseException:
                self.engine.abort_all()
                raise
        return [_as_output(request) for request in pending]


def _as_output(request: _Pending) -> RequestOutput:
    reason = request.text.finish_reason
    if reason is FinishReason.ERROR:
        raise EngineError("the model gave no finite logits; the checkpoint or its dtype is damaged")
    assert reason is not None
    completion = CompletionOutput(
        "".join(request.pieces), tuple(request.token_ids), reason.value, tuple(request.logprobs) or None
    )
    return RequestOutput(tuple(request.prompt_ids), (completion,))


def _as_prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _as_params(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params were given for {count} prompts", param="params")
    return list(params)
