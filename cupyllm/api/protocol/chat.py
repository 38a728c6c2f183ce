"""/v1/chat/completions: the request's own fields, and the shape of answers and chunks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cupyllm.api.protocol.messages import Message
from cupyllm.api.protocol.shared import Ignored, NotYet, SharedRequest, ShownAs, StrictModel
from cupyllm.errors import RequestError

MAX_MESSAGES = 2048
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatTemplateKwargs(StrictModel):
    """What a request may tell the chat template. A fixed list: anything else could change how it runs."""

    enable_thinking: bool | None = None


class ChatRequest(SharedRequest):
    """A conversation to be answered. messages.py says which messages are accepted."""

    messages: Annotated[list[Any], ShownAs(Messages)]
    chat_template_kwargs: ChatTemplateKwargs | None = None

    best_of: Annotated[Any, NotYet((1,))] = None
    tools: Annotated[Any, NotYet(([],))] = None
    tool_choice: Annotated[Any, NotYet(("none",))] = None
    functions: Annotated[Any, NotYet(([],))] = None
    function_call: Annotated[Any, NotYet(("none",))] = None
    logprobs: Annotated[Any, NotYet((False,))] = None
    top_logprobs: Annotated[Any, NotYet()] = None
    reasoning_effort: Annotated[Any, NotYet()] = None
    modalities: Annotated[Any, NotYet((["text"],))] = None
    audio: Annotated[Any, NotYet()] = None
    web_search_options: Annotated[Any, NotYet()] = None

    parallel_tool_calls: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None
    moderation: Ignored = None

    @property
    def enable_thinking(self) -> bool | None:
        return None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking

    def check_limits(self) -> None:
        """Raise RequestError for more messages than any template should have to walk through."""
        check_number_of_messages(self.messages)


def check_number_of_messages(messages: list[Any]) -> None:
    """Raise RequestError for more than MAX_MESSAGES."""
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages may hold at most {MAX_MESSAGES}, not {len(messages)}", param="messages")


def chat_choice(index: int, text: str, finish_reason: str) -> dict[str, Any]:
    """A choice of a complete answer."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": finish_reason,
    }


def chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """A choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
