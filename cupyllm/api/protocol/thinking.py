"""What a request says about thinking before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cupyllm.errors import RequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Tokens of reasoning that a level allows. The names are OpenAI's, the numbers ours; models of Qwen3's kind know no
# levels, and mostly think for a few thousand tokens.
EFFORT_BUDGETS = {"minimal": 256, "low": 1024, "medium": 8192, "high": None, "xhigh": None, "max": None}


@dataclass(frozen=True)
class Thinking:
    """How to think before an answer.

    enable        what the chat template is told; None leaves it to the template
    budget        at most so many tokens; None is no limit
    enable_param  the request field that `enable` is from
    budget_param  the same of `budget`
    """

    enable: bool | None = None
    budget: int | None = None
    enable_param: str = "chat_template_kwargs.enable_thinking"
    budget_param: str = "thinking_budget"


def read_thinking(effort: object, enable: bool | None, budget: int | None) -> Thinking:
    """`reasoning_effort`, `chat_template_kwargs.enable_thinking` and `thinking_budget`; None is absent.

    Raises RequestError.
    """
    if effort is None:
        return Thinking(enable, budget)
    if effort not in get_args(ReasoningEffort):
        names = ", ".join(get_args(ReasoningEffort))
        raise RequestError(f"reasoning_effort must be one of: {names}", param="reasoning_effort")
    if effort == "none":
        if enable:
            raise RequestError("reasoning_effort is none, but enable_thinking is true", param="reasoning_effort")
        return Thinking(False, budget, enable_param="reasoning_effort")
    if budget is not None:
        return Thinking(enable, budget)
    return Thinking(enable, EFFORT_BUDGETS[str(effort)], budget_param="reasoning_effort")
