"""/tokenize and /detokenize: the requests, as vLLM has them, with llama.cpp's name for a text (`content`)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cupyllm.api.protocol.chat import ChatTemplateKwargs, Messages, check_continuation, check_number_of_messages
from cupyllm.api.protocol.shared import ShownAs, StrictModel
from cupyllm.api.protocol.tools import Tools
from cupyllm.errors import RequestError

_SOURCES = ("prompt", "content", "messages")
_OF_MESSAGES = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TokenizeRequest(StrictModel):
    """A text or a conversation, to be turned into the token ids that the completion routes would compute with."""

    model: str | None = None
    prompt: Annotated[str | None, Field(description="a raw text; that of a control token becomes this token")] = None
    content: Annotated[str | None, Field(description="llama.cpp's name for `prompt`")] = None
    messages: Annotated[list[Any] | None, ShownAs(Messages)] = None
    tools: Annotated[Any, ShownAs(Tools)] = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[
        bool | None,
        Field(description="what tokenizer.json puts around a text; true when absent, but false with `messages`"),
    ] = None
    return_token_strs: bool = False

    @property
    def wants_special_tokens(self) -> bool:
        """A text gets them unless it is to have none; a conversation has those of its template."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens

    def check(self) -> None:
        """Raise RequestError unless there is one text or conversation, and nothing that belongs to the other kind."""
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                f"give one of prompt, content and messages, not {found}", param=given[-1] if given else "prompt"
            )
        if self.messages is None:
            for name in _OF_MESSAGES:
                if getattr(self, name) is not None:
                    raise RequestError(f"{name} needs messages", param=name)
        else:
            check_number_of_messages(self.messages)
            check_continuation(self.messages, self.continue_final_message is True, self.add_generation_prompt)


class DetokenizeRequest(StrictModel):
    """Token ids to be turned into text, control tokens included."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
