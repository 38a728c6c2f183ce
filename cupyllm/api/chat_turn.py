"""A conversation made ready for the engine, and the model's messages as they come out of it.

The routes that answer conversations share this; what they send is theirs. `prepare_turn` refuses what cannot be
answered, `start_turn` waits for the engine, and `message_deltas` gives the messages piece by piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from cupyllm.api.engine_request import EngineRequest
from cupyllm.api.generation import Delta, Generation, start_generation
from cupyllm.api.protocol.thinking import Thinking
from cupyllm.api.protocol.tools import ToolUse
from cupyllm.api.state import ServerState
from cupyllm.api.turn_guide import guide_turn
from cupyllm.beam_search import BeamParams
from cupyllm.errors import RequestError
from cupyllm.message_parts import CallEnd, ContentText, Message, MessagePart, ReasoningText
from cupyllm.messages import normalise_messages
from cupyllm.reasoning import ThinkTokens
from cupyllm.sampling import SamplingParams
from cupyllm.tool_calls import ToolCallParser


@dataclass(frozen=True)
class ChatTurn:
    """What the model is to answer, and how its answers are to be read."""

    asked: EngineRequest
    tools: ToolUse
    marks: ThinkTokens | None

    @property
    def prompt_ids(self) -> list[int]:
        return self.asked.prompts[0]


@dataclass(frozen=True)
class MessageDelta:
    """What is new in one answer's message, and the delta it was read from: its text may still be undecided.

    finish_reason is set in the last delta of an answer.
    """

    delta: Delta
    parts: list[MessagePart]
    finish_reason: str | None


@dataclass
class FinishedMessage:
    """One answer, complete, with the deltas it was read from."""

    message: Message = field(default_factory=Message)
    finish_reason: str = ""
    deltas: list[Delta] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


def prepare_turn(
    state: ServerState,
    messages: list[Any],
    params: SamplingParams,
    *,
    tools: ToolUse,
    thinking: Thinking,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    priority: int = 0,
    cache_salt: str = "",
    beams: list[BeamParams] | None = None,
) -> ChatTurn:
    """Render the conversation. Raises RequestError for what can never be answered; any thread may call it."""
    template = state.loaded.chat_template
    if template is None:
        raise RequestError("this model has no chat template; use /v1/completions", param="messages")
    try:
        prompt_ids = template.encode(
            normalise_messages(messages),
            tools=tools.shown or None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            enable_thinking=thinking.enable,
        )
        params = guide_turn(state, params, tools, thinking, prompt_ids, beams=bool(beams))
        asked = EngineRequest([prompt_ids], [params], priority, cache_salt, beams or [])
        asked.check(state.loaded.engine)
    except RequestError as error:
        names = {"prompt": "messages", "chat_template_kwargs.enable_thinking": thinking.enable_param}
        error.param = names.get(error.param or "", error.param)
        raise
    return ChatTurn(asked, tools, ThinkTokens.of(state.loaded.tokenizer))


async def start_turn(state: ServerState, request: Request, turn: ChatTurn) -> Generation:
    """Wait until the engine has taken the request. Raises what EngineWorker.submit raises."""
    return await start_generation(state, request, turn.asked, turn.marks)


async def message_deltas(generation: Generation, turn: ChatTurn) -> AsyncIterator[MessageDelta]:
    """The messages as they come, those of all answers mixed, until each has ended.

    Raises what Generation.deltas raises.
    """
    readers: defaultdict[int, _MessageReader] = defaultdict(lambda: _MessageReader(turn.tools))
    async for delta in generation.deltas():
        message_delta = readers[delta.choice].read(delta)
        if message_delta.finish_reason is not None:
            generation.end_choice(delta.choice)  # where the one call that is allowed ended it
        yield message_delta


async def finished_messages(generation: Generation, turn: ChatTurn) -> list[FinishedMessage]:
    """All messages, once the last is complete. Raises what Generation.deltas raises."""
    finished = [FinishedMessage() for _ in range(turn.asked.n)]
    async for new in message_deltas(generation, turn):
        answer = finished[new.delta.choice]
        answer.message.add(new.parts)
        answer.deltas.append(new.delta)
        answer.finish_reason = new.finish_reason or ""
    return finished


class _MessageReader:
    """Reads the deltas of one answer: first reasoning, then content and, where tools may be called, calls."""

    def __init__(self, tools: ToolUse) -> None:
        self._parser = ToolCallParser() if tools.mode != "none" else None
        self._parallel = tools.parallel

    def read(self, delta: Delta) -> MessageDelta:
        parts: list[MessagePart] = [ReasoningText(delta.reasoning)] if delta.reasoning else []
        if self._parser is None:
            parts += [ContentText(delta.text)] if delta.text else []
            return MessageDelta(delta, parts, delta.finish_reason)
        parts += self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish()
        if not self._parallel and any(isinstance(part, CallEnd) for part in parts):
            end = next(i for i, part in enumerate(parts) if isinstance(part, CallEnd))
            return MessageDelta(delta, parts[: end + 1], "tool_calls")
        calls = self._parser.num_calls > 0 and delta.finish_reason == "stop"
        return MessageDelta(delta, parts, "tool_calls" if calls else delta.finish_reason)
