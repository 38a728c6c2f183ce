"""What a request says about thinking before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cupyllm.errors import RequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@dataclass(frozen=True)
class Thinking:
    """How to think before an answer.

    enable  what the chat template is told; None leaves it to the template
    param   the request field that said so
    """

    enable: bool | None = None
    param: str = "chat_template_kwargs.enable_thinking"


def read_thinking(effort: object, enable: bool | None) -> Thinking:
    """`reasoning_effort` and `chat_template_kwargs.enable_thinking`; None is absent. Raises RequestError."""
    if effort is not None and effort not in get_args(ReasoningEffort):
        names = ", ".join(get_args(ReasoningEffort))
        raise RequestError(f"reasoning_effort must be one of: {names}", param="reasoning_effort")
    if effort != "none":
        return Thinking(enable)
    if enable:
        raise RequestError("reasoning_effort is none, but enable_thinking is true", param="reasoning_effort")
    return Thinking(False, "reasoning_effort")
