"""/v1/chat/completions: the request's own fields, and the shape of answers and chunks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cupyllm.api.protocol.messages import Message as InputMessage
from cupyllm.api.protocol.shared import Ignored, NotYet, SharedRequest, ShownAs, StrictModel
from cupyllm.api.protocol.thinking import ReasoningEffort, Thinking, read_thinking
from cupyllm.api.protocol.tools import ToolChoice, Tools, ToolUse, read_tool_use
from cupyllm.errors import RequestError
from cupyllm.message_parts import CallArguments, CallBegin, ContentText, Message, MessagePart, ReasoningText
from cupyllm.sampling import MAX_LOGPROBS

MAX_MESSAGES = 2048
Messages = Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatTemplateKwargs(StrictModel):
    """What a request may tell the chat template. A fixed list: anything else could change how it runs."""

    enable_thinking: bool | None = None


class ChatRequest(SharedRequest):
    """A conversation to be answered. messages.py says which messages are accepted."""

    messages: Annotated[list[Any], ShownAs(Messages)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: ChatTemplateKwargs | None = None
    reasoning_effort: Annotated[Any, ShownAs(ReasoningEffort)] = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    tools: Annotated[Any, ShownAs(Tools)] = None
    tool_choice: Annotated[Any, ShownAs(ToolChoice)] = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    best_of: Annotated[Any, NotYet((1,))] = None
    functions: Annotated[Any, NotYet(([],), instead="tools")] = None
    function_call: Annotated[Any, NotYet(("none",), instead="tool_choice")] = None
    modalities: Annotated[Any, NotYet((["text"],))] = None
    audio: Annotated[Any, NotYet()] = None
    web_search_options: Annotated[Any, NotYet()] = None

    verbosity: Ignored = None
    prediction: Ignored = None
    moderation: Ignored = None

    @property
    def thinking(self) -> Thinking:
        """How the model is to think. Raises RequestError."""
        kwargs = self.chat_template_kwargs or ChatTemplateKwargs()
        return read_thinking(self.reasoning_effort, kwargs.enable_thinking, self.thinking_budget)

    @property
    def tool_use(self) -> ToolUse:
        """What the request says about tools. Raises RequestError."""
        return read_tool_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_limits(self) -> None:
        """Raise RequestError for more messages than a template should have to walk through, and for contradictions."""
        check_number_of_messages(self.messages)
        check_continuation(self.messages, self.continue_final_message, self.add_generation_prompt)


def check_number_of_messages(messages: list[Any]) -> None:
    """Raise RequestError for more than MAX_MESSAGES."""
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages may hold at most {MAX_MESSAGES}, not {len(messages)}", param="messages")


def check_continuation(messages: list[Any], continues: bool, add_generation_prompt: bool | None) -> None:
    """Raise RequestError where `continue_final_message` cannot be honoured."""
    if not continues:
        return
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or last.get("tool_calls"):
        raise RequestError(
            "continue_final_message needs a last message of role assistant, without tool_calls",
            param="continue_final_message",
        )


def chat_choice(index: int, message: Message, logprobs: dict[str, Any] | None, finish_reason: str) -> dict[str, Any]:
    """A choice of a complete answer."""
    content = None if message.tool_calls and not message.content else message.content
    shown: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return {"index": index, "message": shown, "logprobs": logprobs, "finish_reason": finish_reason}


def chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """A choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def chunk_delta(part: MessagePart) -> dict[str, Any] | None:
    """What a piece of a message is in a chunk; None for one that has no shape there."""
    match part:
        case ReasoningText(text):
            return {"reasoning_content": text}
        case ContentText(text):
            return {"content": text}
        case CallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None
